// The place that the host and a view share: step, request and visible steps, which Python can read and set.

export class Place {
  constructor(view) {
    this.view = view;
    this.later = null; // a place in steps that are not here yet
  }

  /** Tell the host the place of the cursor: each place that a person chooses, but not every step that is followed. */
  share() {
    const { store, cursor, model } = this.view;
    if (!store.numSteps) return;
    this.view.classroom.lead(this.now());
    const step = cursor.follow ? null : store.label(cursor.step), request = store.requests[cursor.selected]?.id ?? null;
    const place = { step, follow: cursor.follow, request }, range = cursor.chosenRange;
    this.ranged ||= range !== null;
    if (this.ranged) Object.assign(place, { range });
    const written = JSON.stringify(place);
    if (written === this.shared) return;
    const first = this.shared === undefined;
    this.shared = written;
    this.later = null;
    // Nobody has chosen the first step of a page: told it, the host would lose a place that it chose meanwhile.
    if (first && request === null && (cursor.follow || cursor.step === 0)) return;
    model.set("cursor", place);
    if (step !== null) model.set("step", step);
    model.save_changes();
  }

  /** The place and the view of this page, as followers get it. */
  now() {
    const { store, cursor, shown } = this.view;
    const step = cursor.follow ? null : store.label(cursor.step), request = store.requests[cursor.selected]?.id ?? null;
    return { view: shown, step, follow: cursor.follow, request };
  }

  /** Go to the step that a control of the page is linked to. */
  takeStep(step) {
    const { store, cursor } = this.view;
    if (!Number.isInteger(step)) return;
    if (!store.numSteps) this.later = { step, follow: false, request: null };
    else if (step !== store.label(cursor.step)) cursor.seek(step - store.label(0), { stay: true });
  }

  /** Go to the place that the host names. */
  take(place) {
    const { store, cursor } = this.view;
    if (!place || place.follow === undefined || JSON.stringify(place) === this.shared) return;
    // The place of a teacher may be in a step that this page gets a moment later.
    const isHere = store.numSteps && !(cursor.live && place.step > store.label(cursor.last));
    this.later = isHere ? null : place;
    if (!isHere) return;
    this.shared = JSON.stringify(place);
    if (place.range !== undefined) {
      this.ranged = true;
      if (String(place.range) !== String(cursor.chosenRange)) cursor.showRange(place.range);
    }
    const request = place.request === null ? null : store.byId.get(place.request)?.index ?? null;
    if (request !== cursor.selected) {
      cursor.selected = request;
      this.view.changed("select");
    }
    if (place.step !== null) cursor.seek(place.step - store.label(0), { stay: true });
    else if (place.follow && !cursor.follow) cursor.toLive();
  }

  /** Go to the place that was named before there were any steps. */
  takeLater() {
    const place = this.later;
    if (!place || !this.view.store.numSteps) return;
    this.later = null;
    this.take(place);
  }
}
