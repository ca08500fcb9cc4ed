// The page: what a person sets on the left, the run on the right. A change asks the worker for a new run; while one is
// in progress only the newest change waits.

import { Arrivals, canBeDrawn } from "./arrivals.js";
import { counted } from "../../../viz/js/dom.js";
import { at, h, options } from "./elements.js";
import { Engine } from "./engine.js";
import { decodeRun, decodeState, encodeState, unknownName } from "./link.js";
import { showNumbers } from "./numbers.js";
import { Settings } from "./settings.js";

const VIEW = "./view.js"; // the dashboard's module, made when the site is built
const OWN = "own";
const RULES = [["", "vLLM's rules: first come, first served"], ["priority", "By priority"]];
const ROUTER = "round_robin";
const SLOW_MS = 1200;
const DONE = { run: "simulated", open: "read" }; // commands whose time is told
const MOVE = "Move a slider to simulate the same requests under other settings.";
const BET_FIRST = "B waits for your bet";

const { presets, policies, routers, defaults } = await (await fetch(new URL("presets.json", import.meta.url))).json();

const dataView = ({ buffer, byteOffset, byteLength }) => new DataView(buffer, byteOffset, byteLength);

class Playground {
  /** @param {(host: object) => any} render The dashboard's. */
  constructor(render) {
    this.render = render;
    this.values = { status: { live: false }, options: { view: "scheduler" } };
    this.listeners = new Map();
    this.recording = null;
    this.pinned = null; // the state of the pinned run
    this.replica = null; // that a person has chosen, of a fleet
    this.bets = { right: 0, all: 0 };
    this.judged = false; // whether the verdict is that of a bet
    this.busy = 0; // what has been asked for and is not shown yet
    this.preset = "chunked";
    this.settings = new Settings(at("sliders"), at("switches"), () => this.changed());
    const say = (words) => at("drawing-said").textContent = words;
    this.arrivals = new Arrivals(at("drawing"), (workload) => this.takeDrawing(workload), say);
    options(at("preset"), [...Object.entries(presets).map(([name, { title }]) => [name, title]), ["", "Your own"]]);
    options(at("policy"), [...RULES, ...Object.keys(policies).map((name) => [name, name]), [OWN, "Your own policy"]]);
    options(at("router"), Object.keys(routers).map((name) => [name, name]));
    this.connect();
    this.engine = new Engine((words) => this.say(words));
  }

  connect() {
    at("start").remove();
    // On a page of the documentation there is room for the settings and the picture only.
    document.body.classList.toggle("embedded", self !== top);
    // On a narrow page the run comes first; there is a line to unfold what stands beside it on a wide one.
    const narrow = matchMedia("(max-width: 820px)"), fold = () => at("fold").open = !narrow.matches || self !== top;
    narrow.addEventListener("change", fold);
    fold();
    at("preset").addEventListener("change", () => this.choose(at("preset").value));
    at("text").addEventListener("input", () => this.takeText());
    at("policy").addEventListener("change", () => this.choosePolicy(at("policy").value));
    at("replicas").addEventListener("input", () => this.setFleet(at("replicas").value, at("router").value));
    at("router").addEventListener("change", () => this.setFleet(at("replicas").value, at("router").value));
    at("replica").addEventListener("change", () => this.look(Number(at("replica").value)));
    at("source").addEventListener("input", () => {
      at("policy").value = OWN;
      this.changed();
    });
    const click = (id, what) => at(id).addEventListener("click", what);
    click("reset", () => {
      this.settings.begin(this.settings.base);
      this.changed();
    });
    click("pin", () => this.togglePin());
    click("duel", () => this.busy || this.offerBets(at("bets").hidden));
    at("bets").addEventListener("submit", (event) => {
      event.preventDefault();
      this.settle();
    });
    click("link", () => this.copyLink());
    click("python", () => this.openPython());
    click("cancel", () => this.cancel());
    click("close-recording", () => this.closeRecording());
    click("close-cell", () => at("cell").close());
    click("copy-cell", () => this.copy(at("cell-text").textContent, "The cell is copied."));
    at("file").addEventListener("change", () => {
      const [file] = at("file").files;
      at("file").value = "";
      if (file) this.openRecording(file);
    });
    at("request").addEventListener("change", () => {
      this.asked = at("request").value;
      this.explain();
    });
    at("why").addEventListener("toggle", () => this.explain());
    at("view").addEventListener("wb-theme", ({ detail: theme }) => {
      at("dark").media = theme === "dark" ? "screen" : "not all";
      this.arrivals.draw();
    });
    at("settings").addEventListener("submit", (event) => event.preventDefault());
    addEventListener("dragover", (event) => {
      event.preventDefault();
      at("drop").hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) at("drop").hidden = true;
    });
    addEventListener("drop", (event) => {
      event.preventDefault();
      at("drop").hidden = true;
      if (event.dataTransfer.files[0]) this.openRecording(event.dataTransfer.files[0]);
    });
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.shared) this.readLink();
    });
  }

  // -- what is set -----------------------------------------------------------------------------------------------

  /** The sources of the newest run, as a link holds them: nothing that a preset or a workload says already. */
  get state() {
    const state = {};
    if (at("preset").value) state.preset = this.preset;
    else state.workload = at("text").value;
    if (Object.keys(this.settings.config).length) state.config = { ...this.settings.config };
    const policy = at("policy").value;
    if (policy === OWN) state.source = at("source").value;
    else if (policy) state.policy = policy;
    const replicas = Number(at("replicas").value);
    if (replicas !== this.usualReplicas) state.replicas = replicas;
    if (replicas > 1 && at("router").value !== ROUTER) state.router = at("router").value;
    return state;
  }

  /** The number of replicas that the preset has; 1 for an edited workload. */
  get usualReplicas() {
    return at("preset").value ? presets[this.preset].replicas : 1;
  }

  /** Set the controls of a fleet; a single replica needs no router. */
  showFleet(replicas, router) {
    at("replicas").value = replicas;
    at("num-replicas").textContent = at("replicas").value;
    at("router").value = routers[router] === undefined ? ROUTER : router;
    at("router").disabled = Number(at("replicas").value) === 1;
    at("rule").textContent = at("router").disabled ? "" : `${routers[at("router").value]}.`;
  }

  setFleet(replicas, router) {
    this.showFleet(replicas, router);
    this.changed();
  }

  /** Set everything as a state says; what it does not say is as at the beginning. */
  take(state) {
    this.preset = presets[state.preset] ? state.preset : "chunked";
    const own = typeof state.workload === "string";
    at("preset").value = own ? "" : this.preset;
    at("text").value = own ? state.workload : JSON.stringify(presets[this.preset].workload, null, 1);
    const isKnown = [...RULES.map(([name]) => name), ...Object.keys(policies)].includes(state.policy);
    at("policy").value = state.source !== undefined ? OWN : isKnown ? state.policy : "";
    at("source").value = state.source ?? policies[state.policy] ?? Object.values(policies)[0];
    this.showFleet(state.replicas ?? this.usualReplicas, state.router);
    this.showWorkload(state.config ?? {});
  }

  /** Bring the controls in line with the text of the workload. */
  showWorkload(config = this.settings.config) {
    const preset = at("preset").value;
    at("hint").textContent = preset ? presets[preset].hint : "The workload is yours: it is part of the link.";
    at("own").hidden = !policies[at("policy").value] && at("policy").value !== OWN;
    try {
      const workload = JSON.parse(at("text").value);
      if (!this.recording) this.settings.begin({ ...defaults, ...workload.config }, config);
      at("arrivals").hidden = !canBeDrawn(workload);
      if (!at("arrivals").hidden) this.arrivals.show(workload);
    } catch {
      at("arrivals").hidden = true; // the engine says what is wrong
    }
  }

  choose(preset) {
    if (!preset) {
      at("as-text").open = true;
      return this.takeText();
    }
    this.preset = preset;
    // A fleet has vLLM's rules alone.
    if (presets[preset].replicas > 1 && !at("own").hidden) at("policy").value = "";
    at("text").value = JSON.stringify(presets[preset].workload, null, 1);
    this.showFleet(this.usualReplicas, at("router").value);
    this.opens = true;
    this.showWorkload({});
    this.changed();
  }

  takeText() {
    at("preset").value = "";
    this.showWorkload();
    this.changed();
  }

  takeDrawing(workload) {
    at("text").value = JSON.stringify(workload, null, 1);
    at("preset").value = "";
    at("hint").textContent = "The workload is yours: it is part of the link.";
    this.changed();
  }

  choosePolicy(name) {
    if (policies[name]) at("source").value = policies[name];
    at("own").hidden = !policies[name] && name !== OWN;
    this.changed();
  }

  /** The command that makes the run of a state. */
  command(state) {
    const config = { ...state.config };
    if (state.policy === "priority") config.policy = "priority";
    const source = state.source ?? policies[state.policy] ?? "";
    const workload = state.workload ?? JSON.stringify(presets[state.preset].workload);
    const replicas = state.replicas ?? (state.workload === undefined ? presets[state.preset].replicas : 1);
    return { command: "run", workload, config, policy: source, replicas, router: state.router ?? ROUTER };
  }

  // -- running ---------------------------------------------------------------------------------------------------

  /** @param {object} [place] The place of the cursor that a link names, which stays in the address. */
  changed(place) {
    at("reset").hidden = !Object.keys(this.settings.config).length;
    at("reset").textContent = this.recording ? "As recorded" : "As in the workload";
    this.stale = true;
    // A verdict is about the settings that were bet on, and numbers of before are not of a B that waits for its bet.
    if (this.judged || !at("bets").hidden) at("verdict").hidden = true;
    this.share(place);
    return this.run();
  }

  /** Run the newest state; changes that come meanwhile are run afterwards, the newest only. */
  async run() {
    // A run that takes so long that it can be cancelled may never end: a change takes its place.
    if (this.running) return at("cancel").hidden || this.recording ? undefined : this.cancel();
    if (!at("bets").hidden) {
      return this.awaitBet();
    }
    this.running = true;
    while (this.stale) {
      this.stale = false;
      const shows = this.opens && at("preset").value ? presets[this.preset].shows : "";
      this.opens = false;
      const facts = await this.ask({ ...this.command(this.state), shows });
      if (!facts) break;
      if (shows) this.goTo({ step: facts.opens_at });
    }
    this.running = false;
    if (this.stale) this.run();
    else this.showNumbers();
    const { later } = this;
    this.later = null;
    const isHere = Number.isInteger(later?.replica) && this.facts?.replicas?.[later.replica] !== undefined;
    if (isHere) await this.look(later.replica);
    this.goTo(later);
  }

  /** Until the bet is made, nothing of an earlier B is shown: its settings are no longer those on the left. */
  async awaitBet() {
    this.say(BET_FIRST);
    at("error").hidden = true; // it was about other settings, and so was what is left of an older run
    document.body.classList.remove("outdated");
    this.offerMeasures();
    if (!this.hasOther) return;
    this.hasOther = false;
    const answer = await this.engine.ask({ command: "put_away" });
    if (!answer || at("bets").hidden) return;
    this.show(answer);
    this.say(BET_FIRST);
  }

  /** Offer what can settle a duel of A and the settings of B: steps that may hold more or less measure no time. */
  offerMeasures() {
    const { measures, counts, unit, bounds } = this.duel;
    const differs = ([name, value]) => value !== null && this.settings.value(name) !== value;
    const unequal = unit === "steps" && Object.entries(bounds).some(differs);
    const offered = unequal ? counts : measures, before = at("measure").value;
    options(at("measure"), offered);
    if (offered.some(([name]) => name === before)) at("measure").value = before;
    at("in-steps").hidden = unit === "s";
    at("in-steps").textContent = unequal
      ? "Steps of two token budgets, numbers of seats or chunk caps do not last equally long: " +
        "give the workload a cost model to bet on times."
      : "Steps count, not seconds: the workload has no cost model.";
  }

  /** Show the steps of another replica. */
  look(replica) {
    this.replica = replica;
    return this.ask({ command: "look", replica });
  }

  /** Ask the worker, and show its answer. Returns the facts; null for none or an error, which is shown. */
  async ask(command, content) {
    this.busy++;
    const patience = setTimeout(() => at("cancel").hidden = false, SLOW_MS);
    try {
      await this.engine.ready;
      this.say(command.command === "open" ? "Reading…" : "Running…");
      const answer = await this.engine.ask(command, content);
      if (!answer) return null;
      const { facts } = answer;
      at("error").hidden = !facts.error && !facts.notes?.length;
      at("error").textContent = facts.error ?? (facts.notes ?? []).join("\n");
      // A run that failed leaves an older one on display; another question that fails leaves what is there as it is.
      if (["run", "open"].includes(command.command)) document.body.classList.toggle("outdated", Boolean(facts.error));
      this.say("");
      if (facts.error) return null;
      if (facts.requests) this.show(answer);
      const done = DONE[command.command], ms = facts.seconds * 1000;
      if (done) this.say(`${done} in ${ms < 95 ? Math.ceil(ms) : Math.round(ms / 10) * 10} ms`);
      return facts;
    } catch (problem) {
      this.fail(`Python could not be started: ${problem.message}. Reload the page to try again.`);
      this.say("");
      return null;
    } finally {
      this.busy--;
      clearTimeout(patience);
      at("cancel").hidden = true;
    }
  }

  /** Show the numbers of the run on display, after its picture; a slider that moves on comes first. */
  async showNumbers() {
    const { facts } = this;
    if ((this.stale && at("bets").hidden) || this.counted === facts) return;
    this.counted = facts;
    this.busy++;
    const answer = await this.engine.ask({ command: "numbers" });
    this.busy--;
    if (answer?.facts.summary && facts === this.facts) {
      this.offer(answer.facts.slowest);
      showNumbers(at("numbers"), { ...answer.facts, end: facts.end, pinned: this.pinned && !answer.facts.apart });
    }
  }

  show({ facts, packet, other }) {
    this.facts = facts;
    this.judged = false;
    if (packet) this.first = packet;
    this.showReplicas(facts);
    // The newest run is drawn, and the pinned one (or the recording) outlined over it.
    this.hasOther = Boolean(other) || facts.fleet?.length > 1;
    this.set("packet", dataView(other ?? packet));
    if (other) this.set("other", dataView(this.first));
    at("verdict").hidden = !facts.verdict;
    // A change breaks off as a whole, if there is room for it.
    at("verdict").replaceChildren(...facts.verdict.match(/[^;]+(; )?/g)?.map((change) => h("span", {}, change)) ?? []);
    if (!facts.requests.includes(at("request").value)) this.offer(facts.requests);
    at("pin").textContent = this.pinned ? "Unpin A" : "Pin this run as A";
    at("pin").setAttribute("aria-pressed", String(Boolean(this.pinned)));
    at("pin").hidden = Boolean(this.recording);
    at("duel").hidden = !this.pinned || Boolean(facts.apart);
    if (!this.pinned) this.offerBets(false);
    if (facts.measures) this.duel = facts;
    this.showNumbers();
    this.explain();
  }

  /** Offer requests to be explained, the slowest first; one that a person or a link has chosen stays chosen. */
  offer(requests) {
    const before = at("request").value, isHere = requests.includes(this.asked);
    const offered = new Set([...requests.slice(0, 1000), ...(isHere ? [this.asked] : [])]);
    options(at("request"), [...offered].map((id) => [id, id]));
    if (isHere) at("request").value = this.asked;
    if (at("request").value !== before) this.explain();
  }

  /** Show the replicas of a fleet as rows, and the choice of the one whose steps are drawn below. */
  showReplicas({ fleet, replica, replicas, concentration }) {
    at("fleet").hidden = !replicas;
    if (!replicas) return;
    at("concentration").hidden = !concentration;
    at("concentration").textContent = concentration;
    const words = (requests, i) => `replica ${i}: ${requests.toLocaleString("en")} request${requests === 1 ? "" : "s"}`;
    options(at("replica"), replicas.map((requests, i) => [i, words(requests, i)]));
    at("replica").value = replica;
    const sides = fleet.length > 1 && this.pinned
      ? [`A: ${this.fleetOf(this.pinned)}`, `B: ${this.fleetOf(this.state)}`]
      : [];
    at("rows").replaceChildren(...fleet.map((drawing, i) => {
      const picture = new DOMParser().parseFromString(drawing, "image/svg+xml").documentElement;
      return h("figure", {}, sides[i] ? h("figcaption", {}, sides[i]) : [], document.importNode(picture, true));
    }));
  }

  /** The number of replicas of a state, and their router. */
  fleetOf(state) {
    const { replicas, router } = this.command(state);
    return replicas > 1 ? `${replicas} replicas, ${router}` : "1 replica";
  }

  fail(words) {
    at("error").hidden = false;
    at("error").textContent = words;
  }

  say(words) {
    at("status").textContent = words;
  }

  /** Give the view a value, as a notebook would. */
  set(name, value) {
    this.values[name] = value;
    if (!this.view) {
      const model = {
        get: (key) => this.values[key],
        set: (key, value) => {
          if (key === "cursor") this.place = value; // a person has moved it
        },
        save_changes() {},
        on: (event, listener) => this.listeners.set(event, listener),
        off: (event) => this.listeners.delete(event),
      };
      // In a shadow tree, so that the styles of the page and of the view do not meet.
      this.view = this.render({ model, el: at("view").attachShadow({ mode: "open" }) });
    } else this.listeners.get(`change:${name}`)?.();
  }

  /** Cancel the run; the newest state, if it was changed meanwhile, runs next. */
  async cancel() {
    this.engine.stop();
    const changed = this.stale;
    this.stale = false;
    at("error").hidden = at("cancel").hidden = true;
    if (this.recording) {
      this.forgetRecording();
      this.take({});
    }
    if (this.pinned) {
      const pinned = this.pinned;
      this.pinned = null;
      at("error").textContent = "";
      await this.ask(this.command(pinned));
      await this.ask({ command: "pin" });
      this.pinned = pinned;
    }
    this.stale ||= changed;
    if (this.stale) return this.run();
    this.fail("The run was cancelled. Change something to run again.");
    await this.engine.ready;
    if (!this.running) this.say("");
  }

  // -- comparing, sharing ----------------------------------------------------------------------------------------

  async togglePin() {
    if (this.busy) return;
    if (!this.pinned && document.body.classList.contains("outdated")) return this.say("There is no run to pin.");
    const pinned = this.pinned = this.pinned ? null : this.state;
    this.offerBets(false);
    await this.ask({ command: pinned ? "pin" : "unpin" });
    this.share();
  }

  /** Show or hide the bets of a duel; while they are shown, no run is made. */
  offerBets(shown) {
    at("bets").hidden = !shown;
    at("duel").setAttribute("aria-expanded", String(shown));
    if (shown) {
      at("bets").reset();
      this.offerMeasures();
      at("fold").open = true; // B is made by what is folded away on a narrow page
      requestAnimationFrame(() => at("bets").scrollIntoView({ block: "center" })); // which is below its settings there
      at("verdict").hidden = true;
      if (!this.hasOther) return;
      this.stale = true; // B comes back with the bet, or without it
      return this.awaitBet();
    } else if (this.stale) return this.run();
  }

  /** Run B, and say who has won and what the bets came to. */
  async settle() {
    const [measure, bet] = [at("measure").value, at("bets").elements.bet.value];
    if (JSON.stringify(this.state) === JSON.stringify(this.pinned)) {
      return this.fail("B is the same as A: change a setting or the policy first.");
    }
    this.stale = true;
    await this.offerBets(false);
    if (document.body.classList.contains("outdated")) return this.betAgain(measure, bet); // the page says why
    const facts = await this.ask({ command: "settle", measure });
    if (!facts) return;
    this.bets.all++;
    this.bets.right += Number(facts.winner === bet);
    const right = facts.winner === bet ? "you were right" : "you were wrong";
    this.judged = true;
    at("verdict").hidden = false;
    at("verdict").textContent = `${facts.told} You bet on ${bet}: ${right}. ` +
      `Right so far: ${this.bets.right} of ${this.bets.all}.`;
  }

  /** Open the bets again after a B that could not run: the next one waits for its bet, too. */
  betAgain(measure, bet) {
    this.offerBets(true);
    at("measure").value = measure;
    at("bets").elements.bet.value = bet;
  }

  /** Put what is set into the address, and for a link to send the place of the cursor. */
  async share(at) {
    if (this.recording) return;
    const state = { ...this.state, ...this.pinned && { a: this.pinned }, ...at && { at } };
    const shared = await encodeState(state);
    this.shared = shared;
    history.replaceState(null, "", `#${shared}`);
  }

  async readLink() {
    this.busy++;
    const text = location.hash.slice(1);
    try {
      const linked = await decodeRun(text);
      if (linked) await this.openRun(linked);
      else {
        const state = await decodeState(text);
        await this.openState(state ?? {});
        const unknown = [state?.a, state].flatMap((side) => side ? this.unknownNames(side) : []);
        if (unknown.length) this.fail(unknown.join("\n"));
        if (text && !state) this.fail("This link cannot be read: it is cut off or damaged. Ask for the whole link.");
      }
    } catch (problem) {
      await this.openState({});
      this.fail(problem.message);
    } finally {
      this.busy--;
    }
  }

  /** A sentence for each unknown name in a state; the usual choice stands in its place. */
  unknownNames({ preset, router, policy, workload }) {
    return [
      workload === undefined ? unknownName("preset", preset, Object.keys(presets)) : "",
      unknownName("router", router, Object.keys(routers)),
      unknownName("policy", policy, ["priority", ...Object.keys(policies)]),
    ].filter(Boolean);
  }

  /** Open the run of a link, which stays in the address. */
  async openRun({ run, place }) {
    const { hash } = location;
    this.take({});
    if (!await this.openRecording({ name: "the run of the link", arrayBuffer: () => run })) return;
    this.shared = hash.slice(1);
    history.replaceState(null, "", hash);
    this.goTo(place);
  }

  /** Put the cursor at the step and the request of a link, which may hold anything. */
  goTo(place) {
    if (!place || !this.view) return;
    const step = Number.isInteger(place.step) && place.step >= 0 ? place.step : null;
    const request = typeof place.request === "string" ? place.request : null;
    this.set("cursor", { step, follow: false, request, card: request !== null });
    if (request === null || !this.facts?.requests) return;
    this.asked = request;
    this.offer(this.facts.requests);
  }

  async openState(state) {
    this.pinned = null;
    if (state.a) {
      this.take(state.a);
      if (await this.ask(this.command(this.state))) {
        this.pinned = state.a;
        await this.ask({ command: "pin" });
      }
    } else if (this.view) await this.ask({ command: "unpin" });
    this.take(state);
    this.opens = true; // at what the preset is about, unless the link names a step
    this.later = state.at;
    await this.changed(state.at);
  }

  async copyLink() {
    const replica = this.facts?.replicas && this.replica !== null ? { replica: this.replica } : null;
    await this.share(this.place || replica ? { ...this.place, ...replica } : undefined);
    await this.copy(location.href, "The link is copied: it holds the workload, the settings and the policy.");
  }

  async copy(text, words) {
    try {
      await navigator.clipboard.writeText(text);
      this.say(words);
    } catch {
      this.say("This browser lets no page copy: take the text from the page or its address.");
    }
  }

  async openPython() {
    const { workload, ...newest } = this.command(this.state), a = this.pinned && this.command(this.pinned);
    const { config, policy, replicas, router } = a ?? {}, isCompared = a?.workload === workload;
    const pinned = isCompared ? { config, policy, replicas, router } : null;
    const facts = await this.ask({ ...newest, workload, pinned, command: "python" });
    if (!facts) return;
    at("cell-text").textContent = facts.text;
    at("cell").showModal();
  }

  async explain() {
    if (!at("why").open || !at("request").value) return;
    const facts = await this.ask({ command: "explain", request: at("request").value });
    if (facts) at("explanation").textContent = facts.text;
  }

  // -- recordings ------------------------------------------------------------------------------------------------

  async openRecording(file) {
    const content = await file.arrayBuffer();
    const facts = await this.ask({ command: "open", name: file.name }, content);
    if (!facts) return false;
    this.recording = file.name;
    this.pinned = null;
    at("recording-name").textContent = `${file.name}: ${counted(facts.num_steps, "step")}, ` +
      counted(facts.requests.length, "request");
    at("recording-hint").textContent = facts.refusal ? `Nothing can be changed here: ${facts.refusal}.` : MOVE;
    at("changes").disabled = Boolean(facts.refusal);
    at("policy").value = "";
    at("own").hidden = true;
    this.settings.begin(facts.config);
    at("reset").hidden = true;
    this.showFleet(1, ROUTER);
    at("workload").hidden =
      at("requests").hidden =
      at("fleet-settings").hidden =
      at("link").hidden =
      at("python").hidden =
        true;
    at("recording").hidden = false;
    at("pin").hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
    return true;
  }

  forgetRecording() {
    this.recording = null;
    at("changes").disabled = false;
    at("workload").hidden =
      at("requests").hidden =
      at("fleet-settings").hidden =
      at("link").hidden =
      at("python").hidden =
      at("pin").hidden =
        false;
    at("recording").hidden = true;
  }

  async closeRecording() {
    await this.ask({ command: "close" });
    this.forgetRecording();
    this.take({ preset: this.preset });
    this.changed();
  }
}

const playground = new Playground((await import(VIEW)).render);
globalThis.playground = playground; // for tests, and for use in a browser's console
await playground.readLink();
