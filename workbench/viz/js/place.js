// The place that the host and a view share: step, request and visible steps, which Python can read and set.

export class Place {
  constructor(view) {
    this.view = view;
    this.later = null; // a place in steps that are not here yet
  }

  /** The place of the cursor, as the host gets it; without a range for as long as nobody has chosen one. */
  get written() {
    const { store, cursor } = this.view, range = cursor.chosenRange;
    const step = cursor.follow ? null : store.label(cursor.step), request = store.requests[cursor.selected]?.id ?? null;
    this.ranged ||= range !== null;
    return { step, follow: cursor.follow, request, ...(this.ranged ? { range } : {}) };
  }

  /** The id of the request that a person looks at: that of the open card, else the selected one; null for none. */
  get request() {
    const { store, cursor, inspector } = this.view;
    return store.requests[inspector.pinned?.request ?? cursor.selected]?.id ?? null;
  }

  /** Save a page that opens at this place: view, step, request, and a card or comparison that is open. */
  savePage() {
    const { view, request } = this, { store, cursor, inspector } = view;
    const card = inspector.pinned?.kind === "request";
    const place = { view: view.shown, step: store.label(cursor.step), request, card };
    view.send("save_html", { place, comparison: view.comparing });
  }

  /** Take the present place as known. Only a person, or playback, moves the host: told a place that the page opened at,
   *  or was sent to, the host would lose one that it chose meanwhile. */
  settle() {
    this.shared = JSON.stringify(this.written);
  }

  /** Tell the host the place of the cursor: each place that a person chooses, but not every step that is followed. */
  share() {
    const { store, model } = this.view;
    if (!store.numSteps) return;
    this.view.classroom.lead(this.now());
    const place = this.written, written = JSON.stringify(place);
    if (written === this.shared) return;
    this.shared = written;
    this.later = null;
    model.set("cursor", place);
    if (place.step !== null) model.set("step", place.step);
    model.save_changes();
  }

  /** The place and the view of this page, as followers get it. */
  now() {
    const { store, cursor, shown } = this.view;
    const step = cursor.follow ? null : store.label(cursor.step), request = store.requests[cursor.selected]?.id ?? null;
    return { view: shown, step, follow: cursor.follow, request };
  }

  /** Whether a step is on this page; a live one may get it a moment later. */
  has(step) {
    const { store, cursor } = this.view;
    return Boolean(store.numSteps) && !(cursor.live && step > store.label(cursor.last));
  }

  /** Go to the step that a control of the page is linked to. */
  takeStep(step) {
    const { store, cursor } = this.view;
    if (!Number.isInteger(step) || step === this.later?.step) return;
    if (!this.has(step)) this.later = { step, follow: false, request: null };
    else if (step !== store.label(cursor.step)) cursor.seek(step - store.label(0), { stay: true });
  }

  /** Go to the place that the host names. */
  take(place) {
    const { store, cursor } = this.view;
    if (!place || place.follow === undefined || JSON.stringify(place) === this.shared) return;
    const isHere = this.has(place.step);
    this.later = isHere ? null : place;
    if (!isHere) return;
    if (place.range !== undefined) {
      this.ranged = true;
      if (String(place.range) !== String(cursor.chosenRange)) cursor.showRange(place.range);
    }
    const request = place.request === null ? null : store.byId.get(place.request)?.index ?? null;
    if (request !== cursor.selected) {
      cursor.selected = request;
      this.view.changed("select");
    }
    if (place.card && request !== null) this.view.inspector.pin({ kind: "request", request });
    if (place.step !== null) cursor.seek(place.step - store.label(0), { stay: true });
    else if (place.follow && !cursor.follow) cursor.toLive();
    this.settle();
  }

  /** Go to the place that was named before there were any steps. */
  takeLater() {
    const place = this.later;
    if (!place || !this.view.store.numSteps) return;
    this.later = null;
    this.take(place);
  }
}
