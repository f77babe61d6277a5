// Asking the endpoint, and listening to it. A key is kept in this tab's session storage and goes into a header only; there are no cookies.
// Covers no drawing.

const KEY = "prefetcher-key";
const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 15;
// The endpoint gives a sign of life every ten seconds.
const SILENT_S = 25;

let refusedKey = () => {};

/** `told(why)` is called where a key is missing or wrong. */
export function onKeyNeeded(told) {
  refusedKey = told;
}

export function hasKey() {
  return keyOf() !== "";
}

export function setKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch { kept = key; }
}

let kept = "";
function keyOf() {
  try { return sessionStorage.getItem(KEY) || kept; } catch { return kept; }
}

function headers() {
  const key = keyOf();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** An error that says what a person can do; `status` 0: nobody answered. */
export class AskError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function problemOf(answer) {
  const told = await answer.json().catch(() => ({}));
  return new AskError(answer.status, told.detail || `${answer.status} ${answer.statusText}`);
}

/** JSON of `path`, which is relative to the page. Raises AskError. */
export async function ask(path, { method = "GET", signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, { method, signal, headers: headers(), cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError(0, "the endpoint does not answer");
  }
  if (answer.ok) return answer.json();
  const error = await problemOf(answer);
  if (error.status === 401) refusedKey(error.message);
  throw error;
}

/**
 * Reads server-sent events of `path` for ever: `heard(name, data)` for each, and `state(what)` with {kind: "open" | "lost" | "refused",
 * why, retry_s}.
 * Gives an object whose `again()` asks at once.
 */
export function listen(path, heard, state) {
  let wait = FIRST_WAIT_S;
  let timer = 0;
  let controller = null;
  let running = false;

  async function run() {
    if (running) return;
    running = true;
    clearTimeout(timer);
    controller = new AbortController();
    let watchdog = 0;
    const live = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => controller.abort(), 1000 * SILENT_S);
    };
    let why = "the connection was lost";
    let kind = "lost";
    try {
      live();
      const answer = await fetch(path, { headers: headers(), signal: controller.signal, cache: "no-store", credentials: "omit" });
      if (!answer.ok) throw await problemOf(answer);
      state({ kind: "open" });
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), (name, data) => {
        live();
        wait = FIRST_WAIT_S;
        heard(name, data);
      });
    } catch (error) {
      if (error instanceof AskError) {
        why = error.message;
        if (error.status === 401) {
          kind = "refused";
          refusedKey(error.message);
        }
      }
    }
    clearTimeout(watchdog);
    running = false;
    // Many pages that lost one server don't all come back at the same moment.
    const retry = wait * (0.75 + Math.random() / 2);
    wait = Math.min(LONGEST_WAIT_S, 2 * wait);
    state({ kind, why, retry_s: retry });
    timer = setTimeout(run, 1000 * retry);
  }

  const again = () => {
    wait = FIRST_WAIT_S;
    if (running) controller.abort();
    else run();
  };
  window.addEventListener("online", again);
  run();
  return { again };
}

async function read(reader, heard) {
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end = text.indexOf("\n\n");
    while (end >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const name = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (name && data) heard(name.slice(7), JSON.parse(data.slice(6)));
      end = text.indexOf("\n\n");
    }
  }
}
