// The arrivals of a workload as dots that can be added, moved and removed: time to the right, prompt length upwards.

const HEIGHT = 120, LEFT = 42, BOTTOM = 18, RADIUS = 4.5, REACH = 9, MAX_LENGTH = 8192;

/** Whether a workload is a plain list of requests, each with a length and a time. */
export function canBeDrawn(workload) {
  const { requests } = workload;
  return Array.isArray(requests) && requests.length > 0 && requests.length <= 400 && Boolean(workload.cost_model) &&
    requests.every((request) => lengthOf(request) !== null && !request?.arrival_step);
}

function lengthOf(request) {
  const prompt = request?.prompt;
  if (Array.isArray(prompt)) return prompt.length;
  if (typeof prompt?.len === "number") return prompt.len;
  if (!Array.isArray(prompt?.parts)) return null;
  const lengths = prompt.parts.map((part) => lengthOf({ prompt: part }));
  return lengths.includes(null) ? null : lengths.reduce((a, b) => a + b, 0);
}

export class Arrivals {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {(workload: object) => void} changed Called with the changed workload.
   */
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.selected = null;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", () => this.release());
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(workload) {
    if (this.dragging) return;
    this.workload = workload;
    const times = workload.requests.map((request) => request.arrival_time ?? 0);
    this.end = Math.max(1, ...times) * 1.08;
    this.top = Math.max(64, ...workload.requests.map(lengthOf)) * 1.3;
    this.draw();
  }

  // Lengths are on a logarithmic axis: questions and documents differ a hundredfold.
  place(request) {
    const width = this.canvas.clientWidth - LEFT - 8, height = HEIGHT - BOTTOM - 8;
    const x = LEFT + (request.arrival_time ?? 0) / this.end * width;
    return [x, 8 + height * (1 - Math.log(lengthOf(request)) / Math.log(this.top))];
  }

  value(event) {
    const box = this.canvas.getBoundingClientRect();
    const width = this.canvas.clientWidth - LEFT - 8, height = HEIGHT - BOTTOM - 8;
    const time = Math.min(1, Math.max(0, (event.clientX - box.left - LEFT) / width)) * this.end;
    const part = Math.min(1, Math.max(0, 1 - (event.clientY - box.top - 8) / height));
    const length = Math.min(MAX_LENGTH, Math.max(1, Math.round(Math.exp(part * Math.log(this.top)))));
    return { time: Math.round(time * 1000) / 1000, length };
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = REACH;
    this.workload.requests.forEach((request, index) => {
      const [left, top] = this.place(request), distance = Math.hypot(left - x, top - y);
      if (distance < least) [best, least] = [index, distance];
    });
    return best;
  }

  press(event) {
    this.selected = this.find(event);
    if (this.selected === null) {
      const { time, length } = this.value(event), { requests } = this.workload;
      const ids = new Set(requests.map((request) => request.id));
      let number = requests.length;
      while (ids.has(`new${number}`)) number++;
      const added = { id: `new${number}`, prompt: { len: length }, max_tokens: 16, arrival_time: time };
      this.workload = { ...this.workload, requests: [...requests, added] };
      this.selected = requests.length;
      this.changed(this.workload);
    }
    this.dragging = true;
    this.canvas.setPointerCapture(event.pointerId);
    this.draw();
  }

  drag(event) {
    if (!this.dragging || this.selected === null || !event.buttons) return;
    const { time, length } = this.value(event);
    this.alter(this.selected, { arrival_time: time, prompt: { len: length } });
  }

  release() {
    this.dragging = false;
  }

  alter(index, change) {
    const requests = this.workload.requests.map((request, i) => i === index ? { ...request, ...change } : request);
    this.workload = { ...this.workload, requests };
    this.draw();
    this.changed(this.workload);
  }

  key(event) {
    const { requests } = this.workload, moves = { ArrowLeft: -0.05, ArrowRight: 0.05 };
    const grows = { ArrowUp: 1.25, ArrowDown: 0.8 };
    if (event.key in moves || event.key in grows || event.key === "Delete" || event.key === "Backspace") {
      event.preventDefault();
    } else return;
    if (this.selected === null || !requests[this.selected]) this.selected = 0;
    const request = requests[this.selected];
    if (event.key in moves) {
      const time = Math.max(0, (request.arrival_time ?? 0) + moves[event.key]);
      this.alter(this.selected, { arrival_time: Math.round(time * 1000) / 1000 });
    } else if (event.key in grows) {
      const length = Math.min(MAX_LENGTH, Math.max(1, Math.round(lengthOf(request) * grows[event.key])));
      this.alter(this.selected, { prompt: { len: length } });
    } else if (requests.length > 1) {
      this.workload = { ...this.workload, requests: requests.filter((_, i) => i !== this.selected) };
      this.selected = null;
      this.draw();
      this.changed(this.workload);
    }
  }

  draw() {
    if (!this.workload || !this.canvas.clientWidth) return;
    const { canvas } = this, ratio = devicePixelRatio || 1, style = getComputedStyle(canvas);
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = HEIGHT * ratio;
    const context = canvas.getContext("2d"), width = canvas.clientWidth, base = HEIGHT - BOTTOM;
    context.scale(ratio, ratio);
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = context.strokeStyle = style.getPropertyValue("--muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.globalAlpha = 0.5;
    for (let length = 10; length < this.top; length *= 10) {
      const y = Math.round(8 + (base - 8) * (1 - Math.log(length) / Math.log(this.top))) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - 8, y);
      context.lineWidth = 0.5;
      context.stroke();
    }
    context.globalAlpha = 1;
    for (let length = 10; length < this.top; length *= 10) {
      const y = 8 + (base - 8) * (1 - Math.log(length) / Math.log(this.top));
      context.fillText(length.toLocaleString("en"), LEFT - 6, y);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText("0 s", LEFT, HEIGHT - 4);
    context.textAlign = "right";
    context.fillText(`${this.end.toPrecision(2)} s`, width - 8, HEIGHT - 4);
    this.workload.requests.forEach((request, index) => {
      const [x, y] = this.place(request);
      context.beginPath();
      context.arc(x, y, index === this.selected ? RADIUS + 1.5 : RADIUS, 0, 2 * Math.PI);
      context.fillStyle = style.getPropertyValue(index === this.selected ? "--text" : "--dot");
      context.fill();
      context.strokeStyle = style.getPropertyValue("--surface");
      context.lineWidth = 1;
      context.stroke();
    });
  }
}
