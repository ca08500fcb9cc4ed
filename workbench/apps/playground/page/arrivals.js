// The arrivals of a workload as dots that can be added, moved and removed: time to the right, prompt length upwards.

const HEIGHT = 120, LEFT = 42, BOTTOM = 18, RADIUS = 4.5, REACH = 9, MAX_LENGTH = 8192;

/** Seconds by which a key moves a request. */
const STEP = 0.05;

const rounded = (time) => Math.round(time * 1000) / 1000;

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
   * @param {(words: string) => void} say Tells the chosen request to those who do not see it.
   */
  constructor(canvas, changed, say = () => {}) {
    this.canvas = canvas;
    this.changed = changed;
    this.say = say;
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
    return { time: rounded(time), length };
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
    if (this.selected === null) this.add(this.value(event));
    this.dragging = true;
    this.canvas.setPointerCapture(event.pointerId);
    this.draw();
  }

  /** Add a request, and choose it. */
  add({ time, length }) {
    const { requests } = this.workload, ids = new Set(requests.map((request) => request.id));
    let number = requests.length;
    while (ids.has(`new${number}`)) number++;
    const added = { id: `new${number}`, prompt: { len: length }, max_tokens: 16, arrival_time: time };
    this.workload = { ...this.workload, requests: [...requests, added] };
    this.selected = requests.length;
    this.changed(this.workload);
  }

  drag(event) {
    if (!this.dragging || this.selected === null || !event.buttons) return;
    const { time, length } = this.value(event);
    this.alter({ arrival_time: time, prompt: { len: length } });
    this.draw();
  }

  release() {
    this.dragging = false;
  }

  /** Change the chosen request. */
  alter(change) {
    const requests = this.workload.requests.map((each, i) => i === this.selected ? { ...each, ...change } : each);
    this.workload = { ...this.workload, requests };
    this.changed(this.workload);
  }

  /** Choose, move, add or remove a request by a key. */
  key(event) {
    const act = this.actOf(event.key);
    if (!act) return;
    event.preventDefault();
    const { requests } = this.workload;
    if (this.selected === null || !requests[this.selected]) this.selected = this.inOrder()[0];
    act(requests[this.selected]);
    this.draw();
    this.say(this.words());
  }

  /** The effect of a key on the chosen request; undefined for other keys. */
  actOf(key) {
    const move = (by) => ({ arrival_time: time = 0 }) => this.alter({ arrival_time: rounded(Math.max(0, time + by)) });
    const grow = (by) => (request) => {
      const length = Math.min(MAX_LENGTH, Math.max(1, Math.round(lengthOf(request) * by)));
      this.alter({ prompt: { len: length } });
    };
    const add = (request) => this.add({ time: rounded((request.arrival_time ?? 0) + STEP), length: lengthOf(request) });
    const remove = (request) => this.remove(request);
    return {
      ArrowLeft: move(-STEP),
      ArrowRight: move(STEP),
      ArrowUp: grow(1.25),
      ArrowDown: grow(0.8),
      PageUp: () => this.choose(-1),
      PageDown: () => this.choose(1),
      Enter: add,
      Delete: remove,
      Backspace: remove,
    }[key];
  }

  /** The places of the requests in order of their arrival. */
  inOrder() {
    const { requests } = this.workload, time = (place) => requests[place].arrival_time ?? 0;
    return requests.map((_, place) => place).sort((a, b) => time(a) - time(b) || a - b);
  }

  /** Choose the request that arrives before the chosen one (-1) or after it (1). */
  choose(by) {
    const order = this.inOrder(), place = order.indexOf(this.selected) + by;
    this.selected = order[Math.max(0, Math.min(order.length - 1, place))];
  }

  remove(request) {
    const { requests } = this.workload;
    if (requests.length === 1) return;
    this.workload = { ...this.workload, requests: requests.filter((each) => each !== request) };
    this.selected = null;
    this.changed(this.workload);
  }

  /** The words about the chosen request. */
  words() {
    const { requests } = this.workload, request = requests[this.selected];
    if (!request) return `${requests.length} requests, none is chosen`;
    const place = this.inOrder().indexOf(this.selected) + 1, time = request.arrival_time ?? 0;
    return `${request.id}, ${place} of ${requests.length}: ${lengthOf(request)} prompt tokens at ${time} s`;
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
