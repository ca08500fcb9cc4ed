// Python in a worker: answers one message after another, and can be stopped in the middle of one.
// The worker is made from a blob, so that it inherits the page's content security policy on any web server.

export class Engine {
  /** @param {(words: string) => void} say Called with a sentence about its state. */
  constructor(say) {
    this.say = say;
    this.count = 0;
    this.waiting = new Map();
    this.start();
  }

  start() {
    const source = `import ${JSON.stringify(new URL("worker.js", import.meta.url).href)};`;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    this.worker = new Worker(url, { type: "module" });
    this.ready = new Promise((resolve, reject) => {
      this.worker.onerror = (event) => reject(new Error(event.message || "the worker could not be started"));
      this.worker.onmessage = ({ data }) => {
        if (data.ready) return resolve(data);
        if (data.fatal) return reject(new Error(data.fatal));
        this.waiting.get(data.id)?.(data);
        this.waiting.delete(data.id);
      };
    });
    this.ready.catch(() => {});
    this.say("Loading Python…");
  }

  /**
   * Send a command; the answer has ``facts``, and ``packet`` and ``other`` if there are runs to show.
   * @param {object} command
   * @param {ArrayBuffer} [content] A recording.
   */
  async ask(command, content) {
    const { ready } = this;
    await ready;
    if (ready !== this.ready) return null; // stopped since
    const id = ++this.count;
    return new Promise((resolve) => {
      this.waiting.set(id, resolve);
      this.worker.postMessage({ id, message: JSON.stringify(command), content }, content ? [content] : []);
    });
  }

  /** Stop what runs: the worker is replaced by a new one, which knows no recording and no pinned run. */
  stop() {
    this.worker.terminate();
    for (const resolve of this.waiting.values()) resolve(null);
    this.waiting.clear();
    this.start();
  }
}
