// The questions of this page, which outlive a reload: the host knows them by its session, the browser's tab keeps them
// for the run they were asked in.

const KEY = "workbench-questions";

export class OwnQuestions {
  constructor(view) {
    this.view = view;
    this.kept = view.options.page ? read() : null;
  }

  /** The questions as [id, prompt], in the order in which they were asked. */
  get all() {
    const { status, store } = this.view, told = status.asked || [], { created } = store.facts;
    const before = created && this.kept?.created === created ? this.kept.questions : [],
      ids = new Set(told.map(([id]) => id));
    return [...before.filter(([id]) => !ids.has(id)), ...told];
  }

  /** Keep them in the tab. */
  keep() {
    const { created } = this.view.store.facts, questions = this.all;
    if (!this.view.options.page || !created || !questions.length) return;
    const kept = { created, questions }, written = JSON.stringify(kept);
    if (written === this.written) return;
    this.written = written;
    this.kept = kept;
    try {
      sessionStorage.setItem(KEY, written);
    } catch {
      // A browser that lets this page keep nothing: the questions end with the page.
    }
  }
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  } catch {
    return null;
  }
}
