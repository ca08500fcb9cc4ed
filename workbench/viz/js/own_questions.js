// The questions of this page, which outlive a reload: the host knows them by its session, the browser's tab keeps them
// for the run they were asked in.

import { keep, kept } from "./tab.js";

const KEY = "workbench-questions";

export class OwnQuestions {
  constructor(view) {
    this.view = view;
    this.kept = view.options.page ? kept(KEY) : null;
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
    const now = { created, questions }, written = JSON.stringify(now);
    if (written === this.written) return;
    this.written = written;
    this.kept = now;
    keep(KEY, now);
  }
}
