// The page: five questions as tabs that carry their short answers, one of them open below; what is chosen is in the address, so that a
// view can be shared. Figures come by server-sent events and short questions; nothing is loaded from elsewhere. Covers no panel: each has
// a module of its own.

import { pointable } from "./charts.js";
import { fill, h, sign } from "./dom.js";
import { ago, clock, count, fieldOf, minute, percent, setZone, size, span, timeOf, whole, zoneName } from "./format.js";
import { ask, hasKey, listen, onKeyNeeded, setKey } from "./net.js";
import * as jobs from "./jobs.js";
import * as now from "./now.js";
import * as why from "./why.js";
import * as worth from "./worth.js";
import * as wrong from "./wrong.js";

const PANELS = { worth, now, why, wrong, jobs };
const QUESTIONS = {
  worth: "Is it worth it?", now: "What is happening now?", why: "Why?", wrong: "What is wrong?", jobs: "Jobs and schedules",
};
const RANGES = {
  "1h": ["1 hour", 3600], "6h": ["6 hours", 21600], "24h": ["24 hours", 86400], "7d": ["7 days", 604800], "30d": ["30 days", 2592000],
  all: ["all time", null],
};
/** The range that is given by its ends, in the address as seconds since 1970; one that is empty is open. */
const BETWEEN = "between";
const DEFAULTS = { tab: "worth", range: "24h", since: "", until: "", zone: "local", model: "", span: "10800", nodes: "", state: "all",
  sort: "worst", page: "0", find: "" };
/** Between two refreshes of a panel while things keep changing, and without any change. */
const SOONEST_MS = 2500;
const LATEST_MS = 15000;
/** The connection may come back by itself before anybody is told that figures are old. */
const PATIENCE_MS = 1500;

const $ = (id) => document.getElementById(id);
const panelRoot = $("panel");
let overview = null;
let chosen = read();
let heardAt = 0;
let link = { kind: "connecting" };
let storeAway = "";
const made = {};
let lastRefresh = 0;
let refreshTimer = 0;
let stream = null;

// --- what is chosen, in the address ---

function read() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  const found = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given[name]) found[name] = given[name];
  if (!PANELS[found.tab]) found.tab = DEFAULTS.tab;
  if (found.range === BETWEEN && (ends(found).length !== 2 || isBackwards(found))) found.range = DEFAULTS.range;
  if (!RANGES[found.range] && found.range !== BETWEEN) found.range = DEFAULTS.range;
  if (found.range !== BETWEEN) Object.assign(found, { since: "", until: "" });
  return found;
}

/** Both ends where they are times, null where open. */
function ends({ since, until }) {
  return [since, until].map((end) => (end === "" ? null : Number(end))).filter((end) => end === null || (end >= 0 && end <= 1e11));
}

function isBackwards(given) {
  const [since, until] = ends(given);
  return (since ?? 0) >= (until ?? nowS());
}

/** What is reported on: as a question, in words, and where it ends, null for now. */
function range() {
  if (chosen.range === BETWEEN) {
    const [since, until] = ends(chosen);
    const from = since === null ? "Since the installation" : `From ${minute(since)}`;
    return { query: `since=${since ?? 0}${until === null ? "" : `&until=${until}`}`, until,
      words: until === null ? from : `${from} to ${minute(until)}` };
  }
  const [words, seconds] = RANGES[chosen.range];
  return { query: `since=${seconds === null ? 0 : chosen.range}`, until: null,
    words: seconds === null ? "Since the installation" : `The last ${words}` };
}

function nowS() {
  return overview?.now_s ?? Date.now() / 1000;
}

function choose(part, { replace = false } = {}) {
  const before = chosen;
  chosen = { ...chosen, ...part };
  const query = new URLSearchParams(Object.entries(chosen).filter(([name, value]) => value !== DEFAULTS[name]));
  const address = location.pathname + (query.size ? `?${query}` : "");
  if (address !== location.pathname + location.search) history[replace ? "replaceState" : "pushState"](null, "", address);
  applied(before);
}

window.addEventListener("popstate", () => {
  const before = chosen;
  chosen = read();
  applied(before);
});

function applied(before) {
  setZone(chosen.zone);
  $("range").value = chosen.range;
  drawBetween();
  $("zone").value = chosen.zone;
  document.title = `${QUESTIONS[chosen.tab]} – prefetcher`;
  if (before.tab !== chosen.tab) fill(panelRoot);
  panelRoot.setAttribute("aria-labelledby", `tab-${chosen.tab}`);
  draw();
  refresh();
}

// --- what panels have ---

/** One answer of the endpoint: kept while a newer one is on its way or can't be had, with its age and what went wrong. */
class Source {
  data = null;
  error = null;
  busy = false;
  path = "";
  at = 0;
  #asking = null;

  async load(path) {
    if (this.busy && path === this.path) return;
    this.#asking?.abort();
    const mine = (this.#asking = new AbortController());
    if (path !== this.path) this.error = null;
    this.path = path;
    this.busy = true;
    try {
      const data = await ask(path, { signal: mine.signal });
      if (mine !== this.#asking) return;
      Object.assign(this, { data, error: null, at: performance.now(), from: path });
    } catch (error) {
      if (mine !== this.#asking) return;
      this.error = error;
    }
    this.busy = false;
    draw();
  }
}

/** What stands above a panel's figures, or in their place: that they are on their way, old, or can't be had. */
function standing(source, what) {
  if (source.data === null && source.error === null) return h("p", { class: "waiting", "aria-busy": "true" }, `Asking for ${what}…`);
  if (source.error === null) return null;
  const old = source.data === null ? "" : ` What is shown is ${span((performance.now() - source.at) / 1000)} old.`;
  return h("div", { class: "problem", role: "alert", "data-key": "standing" },
    sign("bad", `${what[0].toUpperCase()}${what.slice(1)} could not be read: ${source.error.message}.${old}`),
    h("button", { type: "button", "data-act": "again" }, "Try again"));
}

const page = {
  ask,
  choose,
  draw,
  refresh,
  standing,
  source: () => new Source(),
  chosen: () => chosen,
  overview: () => overview,
  range,
  now: nowS,
  mayAct: () => overview?.may_act ?? false,
  width: () => panelRoot.clientWidth - 34,
};

function panel() {
  made[chosen.tab] ??= PANELS[chosen.tab].make(page);
  return made[chosen.tab];
}

function draw() {
  drawTabs();
  drawLink();
  if (!hasSeen()) return;
  fill(panelRoot, panel().view());
}

function hasSeen() {
  return overview !== null || link.kind !== "connecting";
}

function refresh() {
  clearTimeout(refreshTimer);
  lastRefresh = performance.now();
  panel().load();
  if (chosen.tab !== "worth") made.worth?.load();
  refreshTimer = setTimeout(refresh, LATEST_MS);
}

function refreshSoon() {
  const wait = Math.max(0, lastRefresh + SOONEST_MS - performance.now());
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(refresh, wait);
}

// --- the tabs, with their short answers ---

function answers() {
  const told = overview;
  if (!told) return {};
  const { nodes, findings, jobs: work, models } = told;
  const waiting = told.waited_for ? `, ${whole(told.waited_for)} waited for` : "";
  const found = [findings.bad ? count(findings.bad, "fault") : "", findings.warn ? count(findings.warn, "warning") : ""].filter(Boolean);
  return {
    worth: made.worth?.answer() || ["…", "asking for the report"],
    now: nodes.reporting === 0
      ? ["No node reports", nodes.away_in_all ? `${count(nodes.away_in_all, "node")} silent` : "start an agent"]
      : [told.moving ? `${count(told.moving, "load")} under way${waiting}` : "Nothing loads",
        `${count(nodes.reporting, "node")}${nodes.away_in_all ? `, ${nodes.away_in_all} away` : ""}; ` +
        `${percent(told.memory.taken_bytes / Math.max(1, told.memory.budget_bytes))} of ${size(told.memory.budget_bytes)} taken`],
    why: chosen.model ? [chosen.model, "requests, forecast, orders"]
      : ["Look a model up", `${whole(models.ready)} of ${count(models.known, "model")} in memory`],
    wrong: findings.in_all
      ? [found.join(", ") || count(findings.in_all, "note"), findings.first]
      : ["Nothing", "no fault, no warning"],
    jobs: work.known === 0
      ? ["No scheduler", "none ever looked for work"]
      : [work.failed.length ? `${work.failed.join(", ")} failed` : work.running.length ? `${work.running.join(", ")} runs`
        : "All went well",
        work.next ? `next: ${work.next.name} ${ago(work.next.at_s, work.now_s)}` : ""],
  };
}

function kindOf(name) {
  if (!overview) return "quiet";
  if (name === "wrong") return overview.findings.bad ? "bad" : overview.findings.warn ? "warn" : "good";
  if (name === "jobs") return overview.jobs.failed.length ? "warn" : "quiet";
  if (name === "now") return overview.nodes.reporting === 0 || overview.nodes.away_in_all ? "bad" : "quiet";
  return "quiet";
}

function drawTabs() {
  const told = answers();
  fill($("tabs"), Object.entries(QUESTIONS).map(([name, question]) => {
    const [short, more] = told[name] || ["…", ""];
    const isOpen = name === chosen.tab;
    return h("button", {
      type: "button", role: "tab", id: `tab-${name}`, "data-key": name, "data-tab": name, "aria-selected": String(isOpen),
      "aria-controls": "panel", tabindex: isOpen ? "0" : "-1", class: `tab ${kindOf(name)}`,
    }, h("span", { class: "question" }, question), h("strong", {}, short), h("span", { class: "more" }, more));
  }));
}

$("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[data-tab]");
  if (tab) choose({ tab: tab.dataset.tab });
});
$("tabs").addEventListener("keydown", (event) => {
  const names = Object.keys(QUESTIONS);
  const at = names.indexOf(chosen.tab);
  const next = {
    ArrowRight: (at + 1) % names.length, ArrowDown: (at + 1) % names.length, ArrowLeft: (at + names.length - 1) % names.length,
    ArrowUp: (at + names.length - 1) % names.length, Home: 0, End: names.length - 1,
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose({ tab: names[next] });
  $(`tab-${names[next]}`).focus();
});

// --- the connection, and how old everything is ---

function drawLink() {
  const live = $("live");
  const mode = $("mode");
  const age = (performance.now() - heardAt) / 1000;
  if (overview) {
    const words = { on: ["good", "prefetching"], observe: ["note", "observing: nothing is loaded ahead"],
      off: ["warn", "off: demand loading only"] };
    fill(mode, sign(...words[overview.mode]));
  }
  if (link.kind === "open" && overview && !storeAway) fill(live, sign("good", "live"),
    h("span", { class: "small", "aria-hidden": "true" }, ` as of ${clock(overview.now_s, overview.now_s)}`));
  else if (link.kind === "connecting" || (link.kind === "open" && !overview && !storeAway)) fill(live, "Connecting…");
  else fill(live, sign("bad", "not live"), overview ? h("span", { class: "small", "aria-hidden": "true" }, ` ${span(age)} old`) : null);
  $("forget-key").hidden = !hasKey();
  fill($("foot"), `Times in ${zoneName()}. `, overview ? `prefetcher ${overview.version}. ` : "",
    h("a", { href: "docs" }, "HTTP reference"), ", ", h("a", { href: "metrics" }, "metrics"), ".");
  drawNotice(age);
}

function drawNotice(age) {
  const notice = $("notice");
  const wasAway = link.kind === "lost" && performance.now() - link.since > PATIENCE_MS;
  let text = "";
  if (storeAway && link.kind === "open") text = `The state store can't be read: ${storeAway}. `;
  else if (wasAway) text = `The connection is lost: ${link.why}. It is tried again every few seconds. `;
  else if (link.kind === "open" && overview && overview.nodes.reporting === 0 && overview.nodes.away_in_all) {
    const [first] = overview.nodes.away;
    const between = `${span(first.silent_s)} to ${span(first.at_most_s)}`;
    text = `No node reports. ${first.node} was heard of last ${between} ago; look after its agent. `;
  }
  notice.hidden = text === "";
  if (!text) return;
  const old = overview && (wasAway || storeAway) ? `What is shown is as of ${clock(overview.now_s, overview.now_s)}, ${span(age)} ago. `
    : "";
  // Said once, not every second: the age stands in a part that is not read out.
  fill(notice, h("span", {}, text), old ? h("span", { "aria-hidden": "true" }, old) : null,
    wasAway ? h("button", { type: "button", id: "reconnect" }, "Try now") : null);
}

$("notice").addEventListener("click", (event) => {
  if (event.target.closest("#reconnect")) stream.again();
});

function heard(name, data) {
  if (name === "end") return;
  if (name === "away") {
    storeAway = data.why;
    drawLink();
    return;
  }
  const before = overview?.marks;
  const wasAway = storeAway !== "";
  overview = data;
  heardAt = performance.now();
  storeAway = "";
  const marks = PANELS[chosen.tab].marks;
  if (!before || wasAway || marks.some((mark) => before[mark] !== data.marks[mark])) refreshSoon();
  draw();
}

function linkIs(state) {
  const wasLost = link.kind !== "open" && link.kind !== "connecting";
  link = { ...state, since: state.kind === "lost" && link.kind === "lost" ? link.since : performance.now() };
  if (state.kind === "open" && wasLost) refresh();
  draw();
}

// --- what people do ---

panelRoot.addEventListener("click", (event) => {
  const act = event.target.closest("[data-act]");
  if (!act) return;
  const name = act.dataset.act;
  if (name === "copy") copy(act);
  else if (name === "again") refresh();
  else if (name === "model") {
    event.preventDefault();
    choose({ tab: "why", model: act.dataset.model });
    panelRoot.focus();
  } else panel().act?.(name, act, event);
});
for (const kind of ["input", "change", "keydown"]) {
  panelRoot.addEventListener(kind, (event) => {
    const field = event.target.closest("[data-field]");
    if (field) panel().field?.(field.dataset.field, field, event);
  });
}

async function copy(button) {
  const text = button.dataset.text;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without HTTPS there is no clipboard: it is marked, for Ctrl-C.
    getSelection().selectAllChildren(button.parentElement.querySelector("code"));
    button.textContent = "Marked";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

onKeyNeeded((reason) => {
  if ($("key-dialog").open) return;
  fill($("key-why"), `${reason}.`);
  $("key-dialog").showModal();
});
$("key-form").addEventListener("submit", () => {
  setKey($("key").value.trim());
  $("key").value = "";
  stream.again();
  refresh();
});
$("forget-key").addEventListener("click", () => {
  setKey("");
  location.reload();
});

// --- a range from one time to another ---

function drawBetween() {
  $("between").hidden = chosen.range !== BETWEEN;
  for (const end of ["since", "until"]) {
    const field = $(end);
    field.removeAttribute("aria-invalid");
    // Whoever is typing in it sees what they type.
    if (field !== document.activeElement) field.value = chosen[end] === "" ? "" : fieldOf(Number(chosen[end]));
  }
  fill($("between-why"));
}

/** Takes both ends as they stand; what is no range is left, and said once its field is left. */
function between(isLeft) {
  const given = {};
  let wrong = null;
  for (const end of ["since", "until"]) {
    const field = $(end);
    const at = field.value === "" ? null : timeOf(field.value);
    if (!field.validity.valid) wrong ??= [field, "This is no time."];
    given[end] = at === null ? "" : String(at);
  }
  if (wrong === null && isBackwards(given)) wrong = [$("until"), "It must end after it begins."];
  if (wrong === null) choose(given, { replace: true });
  else if (isLeft) {
    fill($("between-why"), wrong[1]);
    wrong[0].setAttribute("aria-invalid", "true");
  }
}

for (const kind of ["change", "focusout"]) $("between").addEventListener(kind, () => between(kind === "focusout"));

fill($("range"), Object.entries(RANGES).map(([name, [words]]) => h("option", { value: name }, name === "all" ? words : `last ${words}`)),
  h("option", { value: BETWEEN }, "from … to …"));
fill($("zone"), h("option", { value: "local" }, Intl.DateTimeFormat().resolvedOptions().timeZone || "local time"),
  h("option", { value: "utc" }, "UTC"));
$("range").addEventListener("change", (event) => {
  const name = event.target.value;
  // Its ends begin as what was shown before: from there, until now.
  const back = RANGES[chosen.range]?.[1] ?? null;
  const inMinutes = (at) => String(60 * Math.floor(at / 60));
  choose(name === BETWEEN ? { range: name, since: back === null ? "" : inMinutes(nowS() - back), until: inMinutes(nowS()) }
    : { range: name, since: "", until: "" });
});
$("zone").addEventListener("change", (event) => choose({ zone: event.target.value }));
$("theme").addEventListener("change", (event) => theme(event.target.value));

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").value = name;
  try { localStorage.setItem("prefetcher-theme", name); } catch { /* it lasts as long as the page */ }
}

let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(draw, 100);
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && link.kind !== "open") stream?.again();
});
// Ages grow while nothing is heard.
setInterval(() => { if (link.kind !== "open" || storeAway) drawLink(); }, 1000);

try { theme(localStorage.getItem("prefetcher-theme") || "auto"); } catch { theme("auto"); }
pointable(panelRoot);
made.worth = worth.make(page);
stream = listen("v1/events", heard, linkIs);
applied({ tab: "" });
