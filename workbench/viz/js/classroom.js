// A class around one dashboard: a teacher whose cursor and view followers see, and questions whose answers followers
// predict before they see the picture. The page of each visitor says what its host knows of the class; see
// workbench/viz/classroom.py.

import { counted, formatNumber, h, plain, replace, setText, table } from "./dom.js";
import { form, submitButton } from "./popovers.js";
import { keep, kept } from "./tab.js";

/** Milliseconds between two places that a teacher's page tells. */
const LEAD_MS = 100;

/** Names by which only this machine calls itself. */
const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;

const UNREACHED = "Only this machine reaches this address: start the server with --host 0.0.0.0 for other machines.";

const STOPPED = "The teacher has stopped: look around. This page follows again when somebody teaches.";

/** The words of a page instead of an answer while its class predicts. */
export const HIDDEN = "The class predicts: the pictures come after its answers.";

/** The tab keeps the role of its page, which outlives a reload. */
const KEPT = "workbench-class";

/** The tab keeps the id of its visitor, who is counted once however often the page is loaded. */
const VISITOR = "workbench-visitor";

/** The role that an address asks for: #teach=KEY or #follow. */
function roleOf(hash) {
  const [, teach, key] = /^#(?:(teach)=(.+)|follow)$/.exec(hash) || [];
  if (teach) return { role: "teacher", key: decodeURIComponent(key) };
  return hash === "#follow" ? { role: "follower" } : kept(KEPT);
}

/** A random id, which names nobody: pages over HTTP have no randomUUID. */
function newVisitor() {
  const id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("");
  keep(VISITOR, id);
  return id;
}

export class Classroom {
  constructor(view) {
    this.view = view;
    this.asked = view.options.page ? roleOf(location.hash) : null;
    const button = (words, title, onclick, kind = "wb-button") =>
      h("button", { class: kind, type: "button", title, onclick }, words);
    this.key = this.asked?.key || ""; // the key of a page that teaches, or has taught
    this.visitor = null;
    this.hides = false; // whether the pictures are hidden while the class predicts
    this.words = h("strong", {});
    this.follow = button("Follow the teacher", "See the step and the view of the teacher", () => this.join("follower"));
    this.leave = button("Leave", "Move your own cursor again", () => this.join("visitor"));
    this.stop = button("Stop teaching", "Let the class go; this tab can teach again", () => this.join("visitor"));
    this.again = button("Teach again", "Lead the class from this page", () => this.join("teacher", this.key));
    const opened = "pages opened by it follow you.";
    const copy = () => view.linkBox.show("The followers' link", this.link, this.copy, `${opened} ${this.unreached}`);
    this.copy = button("Copy the followers' link", "Pages opened by it follow you", copy);
    const show = () => this.view.send("class", { what: "code", link: this.facts.code?.length ? "" : this.link });
    this.show = button("Show its QR code", "For the cameras of the class", show);
    const open = () => this.view.send("class", { what: "questions", allowed: !this.facts.class_asks });
    this.open = button("Let the class ask", "Followers may ask the model", open);
    this.code = h("div", { class: "wb-code" });
    this.prompt = h("input", {
      type: "text",
      required: true,
      maxlength: 240,
      placeholder: "Ask for a prediction…",
      "aria-label": "Question",
      size: 38,
    });
    const choices = "a, b, c or empty for a number";
    this.choices = h("input", { type: "text", placeholder: choices, "aria-label": "Choices", size: 34 });
    this.form = form({ class: "wb-form" }, () => this.ask(), this.prompt, this.choices, submitButton("Ask the class"));
    this.question = h("div", { class: "wb-predict", role: "status" });
    this.close = button("Close", "Take the answers away", () => this.view.send("class", { what: "close" }), "wb-quiet");
    const buttons = [this.follow, this.leave, this.copy, this.show, this.open, this.stop, this.again];
    const bar = h("div", { class: "wb-bar" }, this.words, buttons);
    this.element = h(
      "section",
      { class: "wb-class", hidden: true, "aria-label": "Class" },
      bar,
      this.code,
      this.form,
      this.question,
    );
  }

  /** Take the role that the address has asked for; a class is told of every visitor. */
  begin() {
    if (this.asked && this.asked.role !== "visitor") this.join(this.asked.role, this.key);
    else if (this.view.options.page && this.view.status.class) this.join("visitor");
  }

  join(role, key = "") {
    keep(KEPT, role === "visitor" && !this.key ? null : { role, key: this.key });
    this.visitor ??= kept(VISITOR) ?? newVisitor();
    this.view.send("class", { what: "join", role, key, visitor_id: this.visitor });
  }

  /** The server has refused the key, such as that of a server before. */
  forget() {
    this.key = "";
    keep(KEPT, null);
  }

  get facts() {
    return this.view.status.class || {};
  }

  /** The followers' link: no phone reaches the loopback address at which a teacher may have opened this page. */
  get link() {
    const { origin } = this.facts, own = location;
    const isOfServer = origin && LOOPBACK.test(own.hostname) && new URL(origin).port === own.port; // not a tunnel's
    return `${isOfServer ? origin : own.origin}${own.pathname}#follow`;
  }

  /** Words about a link that only this machine can open; "" for another one. */
  get unreached() {
    return LOOPBACK.test(new URL(this.link).hostname) ? UNREACHED : "";
  }

  ask() {
    this.view.send("class", { what: "ask", text: this.prompt.value, choices: this.choices.value });
    this.prompt.value = this.choices.value = "";
  }

  /** Tell the followers the place of the teacher, a few times a second. */
  lead(place) {
    if (this.facts.role !== "teacher") return;
    const written = JSON.stringify(place);
    if (written === this.led) return;
    this.led = written;
    this.place = place;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.view.send("class", { what: "lead", ...this.place });
    }, LEAD_MS);
  }

  /** Whether this page follows, and a person has moved it away from the teacher's place. */
  get isAway() {
    const { role, lead } = this.facts;
    return role === "follower" && Boolean(lead?.view) && JSON.stringify(this.view.place.now()) !== JSON.stringify(lead);
  }

  /** Go to the teacher's place again. */
  goBack() {
    this.taken = null;
    this.take(this.facts.lead);
  }

  /** Go where the teacher is, whenever that place changes. */
  take(lead) {
    const written = JSON.stringify(lead);
    if (!lead?.view || written === this.taken) return;
    this.taken = written;
    if (lead.view !== this.view.shown) this.view.show(lead.view);
    this.view.place.take(lead);
  }

  update() {
    const { role, taught, ended, visitors, followers, question, answered, spread, lead, code, score } = this.facts;
    this.keepPictures(this.facts);
    if (role === "visitor" && this.view.status.message && kept(KEPT)?.role === "teacher") this.forget();
    const teaches = role === "teacher", follows = role === "follower";
    this.element.hidden = this.view.gone || (!teaches && !follows && !taught && !this.key);
    this.hides = Boolean(question && (teaches || (follows && !answered)));
    this.view.root.toggleAttribute("data-predicting", this.hides);
    if (this.element.hidden) return;
    const count = teaches &&
      `You teach: ${followers} of ${counted(visitors, "visitor")} ${followers === 1 ? "follows" : "follow"}.`;
    const followed = taught ? "You follow the teacher." : ended ? STOPPED : "You follow: the teacher is not here yet.";
    const beside = taught ? "A teacher leads a class here." : "You have stopped teaching.";
    setText(this.words, teaches ? count : follows ? followed : beside);
    this.follow.hidden = teaches || follows || !taught;
    this.leave.hidden = !follows;
    this.stop.hidden = !teaches;
    this.again.hidden = teaches || follows || !this.key;
    this.copy.hidden =
      this.show.hidden =
      this.open.hidden =
      this.form.hidden =
        !teaches;
    setText(this.open, this.facts.class_asks ? "Stop the class's questions" : "Let the class ask");
    setText(this.show, code?.length ? "Hide the QR code" : "Show its QR code");
    this.draw(code || []);
    if (follows) this.take(lead);
    this.compare(score);
    const signature = JSON.stringify([role, question, answered, spread, followers, score]);
    if (signature === this.signature) return;
    this.signature = signature;
    replace(
      this.question,
      question
        ? teaches ? this.progressOf(question, spread, followers) : this.boxOf(question, answered)
        : score && [scoreOf(score, this.pictures), teaches && [this.markOf(score), this.close]],
    );
    if (score && !question && score.number !== this.scored) this.showScore(score);
  }

  /** Bring the end of a question or a duel into sight, once. */
  showScore({ number }) {
    this.scored = number;
    this.view.scrollTo(this.element);
  }

  /** Show the comparison of a duel that was settled, once, when it is here. It closes with the duel. */
  compare(score) {
    const { duel } = this.view.comparison?.fork ?? {};
    if (this.compared && score?.number !== this.compared) {
      if (duel === this.compared) this.view.showComparison(false); // else one that was asked for since
      this.compared = 0;
    }
    if (!score?.compares || score.number === this.compared || duel !== score.number) return;
    this.compared = score.number;
    this.view.showComparison(true);
  }

  /** Keep the pictures of a duel, which are sent until the host knows that they are here. */
  keepPictures({ pictures, score }) {
    if (!pictures || this.kept === score.number) return;
    this.kept = score.number;
    this.pictures = pictures.map(([caption, drawing]) => {
      const src = `data:image/svg+xml,${encodeURIComponent(drawing)}`;
      return h("figure", {}, h("figcaption", {}, caption), h("img", { alt: altOf(drawing), src }));
    });
    this.view.send("class", { what: "seen", number: score.number });
  }

  /** Draw the QR code: dark squares on white in both themes, within the margin of 4 that cameras need. */
  draw(rows) {
    const written = rows.join();
    if (written === this.drawn) return;
    this.drawn = written;
    const size = rows.length + 8, canvas = h("canvas", { role: "img", "aria-label": `QR code of ${this.link}` });
    canvas.width = canvas.height = 8 * size;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = "#000";
    rows.forEach((row, y) =>
      [...row].forEach((dark, x) => dark === "1" && context.fillRect(8 * (x + 4), 8 * (y + 4), 8, 8))
    );
    if (!rows.length) return replace(this.code);
    replace(this.code, canvas, h("p", {}, this.link), this.unreached && h("p", { class: "wb-hint" }, this.unreached));
  }

  /** The number of answers so far, and the button that shows the answers and the picture to everybody. */
  progressOf({ text, choices, duel, sides }, spread, followers) {
    const given = spread.reduce((sum, [, n]) => sum + n, 0);
    const end = () => this.view.send("class", { what: "end" }), settle = () => this.view.send("settle");
    const button = (words, onclick, kind = "") =>
      h("button", { class: `wb-button ${kind}`, type: "button", onclick }, words);
    const buttons = duel
      ? [button("Settle the duel", settle, "wb-primary"), button("Call it off", end)]
      : button("Show the picture", end, "wb-primary");
    return [
      h("p", { class: "wb-asked" }, plain(text, 240)),
      !duel && choices.length > 0 &&
      h("ul", { class: "wb-choices" }, choices.map((each) => h("li", {}, plain(each, 60)))),
      sidesOf(sides),
      h("p", {}, `${given} of ${counted(followers, "follower")} answered.`),
      h("div", { class: "wb-bar" }, buttons),
    ];
  }

  /** The way to tell the class the right answer, or another one, once the picture is shown. */
  markOf({ asked, choices, right = null }) {
    if (!asked) return null;
    const mark = (value) => this.view.send("class", { what: "mark", value });
    const button = (words) => {
      const pressed = { "aria-pressed": String(words === right), onclick: () => mark(words) };
      return h("button", { class: "wb-button", type: "button", ...pressed }, words);
    };
    const field = h("input", { type: "number", step: "any", required: true, "aria-label": "The right answer" });
    if (right !== null) field.value = String(right);
    const box = choices.length
      ? choices.map(button)
      : form({ class: "wb-form" }, () => mark(Number(field.value)), field, submitButton("Tell the class"));
    return h("div", { class: "wb-bar" }, h("span", {}, "It was"), box);
  }

  /** The question to a follower, who sees the pictures after answering. */
  boxOf({ number, text, choices, sides, duel }, answered) {
    const title = [h("p", { class: "wb-asked" }, plain(text, 240)), sidesOf(sides)];
    const next = duel ? "The score comes when the teacher settles the duel." : "Now look at the picture.";
    if (answered) return [title, h("p", {}, `Your answer is with the teacher. ${next}`)];
    const answer = (value) => this.view.send("class", { what: "answer", number, value });
    const button = (words) => h("button", { class: "wb-button", type: "button", onclick: () => answer(words) }, words);
    const field = h("input", { type: "number", step: "any", required: true, "aria-label": "Your prediction" });
    const box = choices.length
      ? h("div", { class: "wb-bar" }, choices.map(button))
      : form({ class: "wb-form" }, () => answer(Number(field.value)), field, submitButton("Predict"));
    return [title, box, h("p", { class: "wb-hint" }, "The pictures are shown after your answer. It has no name.")];
  }
}

/** The answers as bars, each with its count and its share; the right one is marked. */
function barsOf(spread, right = null) {
  const counts = spread.map(([, n]) => n), all = Math.max(1, counts.reduce((sum, n) => sum + n, 0));
  const row = ([words, n]) => [
    h("dt", {}, plain(words, 60)),
    h(
      "dd",
      {},
      h("i", { style: `width:${(70 * n) / Math.max(1, ...counts)}%` }),
      h("span", {}, `${n} (${Math.round((100 * n) / all)}%)${words === right ? " ✓" : ""}`),
    ),
  ];
  return h("dl", { class: "wb-spread" }, spread.map(row));
}

/** The routers of a duel with their rules. */
function sidesOf(sides) {
  if (!sides) return null;
  const row = ([side, name, rule]) => [h("dt", {}, side), h("dd", {}, h("code", {}, name), `: ${rule}.`)];
  return h("dl", { class: "wb-sides" }, sides.map(row));
}

const answerWords = (value) => typeof value === "number" ? formatNumber(value, 6) : plain(String(value), 60);

/** The right answer of a question and how many gave it, or how near the nearest came, once the teacher has told it. */
function rightOf({ right = null, num_right: numRight, num_given: numGiven, nearest }) {
  if (right === null) return null;
  const near = numRight || nearest === null ? "" : ` The nearest answer is ${answerWords(nearest)}.`;
  const are = numGiven === 1 || numRight === 1 ? "is" : "are";
  const count = numGiven ? ` ${numRight} of ${counted(numGiven, "answer")} ${are} right.` : "";
  return h("p", { class: "wb-right" }, h("strong", {}, `It was ${answerWords(right)}.`), `${count}${near}`);
}

/** The end of a question: all answers. The end of a duel: the winner, how many bet on it, and both sides. */
function scoreOf(score, pictures) {
  if (score.asked) {
    const { right = null } = score, verdict = score.mine === right ? ": right" : score.choices.length ? ": wrong" : "";
    const own = score.mine !== null &&
      h("p", {}, `You answered ${answerWords(score.mine)}${right === null ? "" : verdict}.`);
    const all = score.spread.some(([, n]) => n) ? barsOf(score.spread, right) : h("p", {}, "Nobody answered.");
    return [h("p", { class: "wb-asked" }, plain(score.asked, 240)), rightOf(score), own, all];
  }
  const { sentence, winner, mine, right, bets, notes, rows, spread } = score;
  const own = mine ? `You bet on ${mine}: ${mine === winner ? "right" : "wrong"}. ` : "";
  const told = `${own}${right} of ${counted(bets, "bet")} ${bets === 1 || right === 1 ? "was" : "were"} right.`;
  return [
    h("p", { class: "wb-asked" }, sentence),
    h("p", {}, bets > 0 ? told : "Nobody bet."),
    bets > 0 && barsOf(spread),
    rows.length > 0 && h("div", { class: "wb-fleets" }, pictures),
    rows.length > 0 && table(["measure", "A", "B"], rows),
    notes.map((note) => h("p", {}, note)),
  ];
}

/** The words of a drawing, for those who do not see it. */
const altOf = (drawing) => /aria-label="([^"]*)"/.exec(drawing)?.[1] ?? "";
