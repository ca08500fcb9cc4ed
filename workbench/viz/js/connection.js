// The connection of a served page to its server. A server ends, a phone leaves its network: the page says so, and when
// the server answers again it offers to load itself again, or does it where nobody would lose anything.

/** The words of a page whose server does not answer. */
export const NO_SERVER = "The server does not answer: is it still running, and are you in its network?";

const IS_BACK = "The server answers again. The page keeps what it has, and gets nothing new until it is loaded again.";

/** Milliseconds between two questions whether the server answers, and those that an answer may take. */
const ASK_MS = 3000, ANSWER_MS = 5000;

/** Whether the server of this page, and not only a proxy before it, answers for a script of the page. */
async function answers() {
  try {
    const { src } = [...document.scripts].find((script) => script.src.startsWith(location.origin)) ?? {};
    const asked = { method: "HEAD", cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) };
    return (await fetch(src ?? location.href, /** @type {RequestInit} */ (asked))).status < 500;
  } catch {
    return false;
  }
}

export class Connection {
  constructor(view) {
    this.view = view;
    this.isBack = false; // whether the server answers again
    // Of Bokeh's documents alone, which a page that is served has: the event of a websocket that was closed.
    this.document = view.options.page ? view.model.model?.document : null;
    this.check = () => this.ask();
    this.document?.on_event?.("connection_lost", () => this.lose());
    if (this.document) addEventListener("offline", this.check);
  }

  /** Whether the page has a server, which may end or be out of reach. */
  get served() {
    return Boolean(this.document);
  }

  /** A command had no answer, or the network has gone: without a server the page rests. */
  async ask() {
    if (this.served && !this.view.gone && !await answers()) this.lose();
  }

  lose() {
    if (this.view.gone || this.ended) return;
    this.view.lose(NO_SERVER, "not connected");
    this.wait();
  }

  /** Ask until the server answers. */
  wait() {
    this.timer = setTimeout(async () => {
      const back = await answers();
      if (this.ended) return;
      if (back) this.comeBack();
      else this.wait();
    }, ASK_MS);
  }

  /** A follower's page shows what the teacher shows, so it loses nothing; others choose the moment. */
  comeBack() {
    const { classroom, question } = this.view;
    if (classroom.facts.role === "follower" && !question.ask.prompt.value) return this.reload();
    this.isBack = true;
    this.view.say(IS_BACK);
  }

  reload() {
    location.reload();
  }

  end() {
    this.ended = true;
    clearTimeout(this.timer);
    removeEventListener("offline", this.check);
  }
}
