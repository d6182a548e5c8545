// What all parts of the page share. The scripts of this folder are one module: widget.py joins them, page.js first,
// dashboard.js last.
//
// Together they draw frames of nbstate's dashboard. One frame in, the same nodes patched: nothing is built twice, so
// focus, selection and scroll positions survive ten frames a second. Strings go into the page as text nodes only, never
// as markup.
//
// Kernel to page: trait `frame`, utf-8 JSON (see model.py), and custom messages {kind: "clock", now} and
// {kind: "text", of, title, text}, the answer to stacks or diagnose.
// Page to kernel: custom messages {kind: "interrupt" | "stop" | "stacks" | "diagnose" | "hello"}.

const TABLE_ROWS = 32; // beyond this a heat map
const STRIP_STEPS = 48;
const STRIP_PITCH = 3; // pixels a step
const TICK = 200; // milliseconds between two looks at the clock
const PRESSED = 3000; // milliseconds a pressed button says so
const PATIENCE = 15000; // milliseconds a question may take before its button can be pressed again

// A letter for each phase, so that a cell of the heat map is not told by its colour alone.
const PHASES = {
  absent: ["·", "not started"],
  starting: ["s", "starting"],
  running: ["r", "running"],
  loader: ["l", "in loader"],
  collective: ["c", "in collective"],
  barrier: ["b", "in barrier"],
  returning: ["e", "returning"],
  finished: ["✓", "finished"],
  failed: ["✕", "failed"],
  stopped: ["■", "stopped"],
};

// A new control is one entry here and its name in a frame's `actions`.
const ACTIONS = {
  diagnose: { label: "Diagnose", pressed: "Diagnosing…", title: "Look closer and say what is wrong", asks: true },
  stacks: { label: "Stacks", pressed: "Taking stacks…", title: "Show where every rank is now", asks: true },
  interrupt: { label: "Interrupt", pressed: "Interrupting…", title: "Raise KeyboardInterrupt in every rank" },
  stop: { label: "Stop", pressed: "Stopping…", title: "End every rank now" },
};

// Columns that give way in a narrow cell, from the right, have a class for the container queries of the style sheet.
const COLUMNS = [
  ["rank", "rank", "num"],
  ["device", "device", ""],
  ["phase", "phase", ""],
  ["step", "step", "num"],
  ["epoch", "epoch", "num"],
  ["sync", "gradients", ""],
  ["strip", `${STRIP_STEPS} steps, tall: sync`, ""],
  ["last", "last collective", "num"],
  ["took", "time in it", "num"],
  ["what", "shape · group", ""],
  ["memory", "memory", ""],
  ["use", "util", "num"],
];

function make(tag, className = "", attributes = {}, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (value === null || value === "") {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

function setShown(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

// Makes `parent` hold `count` children, made by `build(i)` and kept in `pool`.
function setCount(parent, pool, count, build) {
  while (pool.length < count) {
    const made = build(pool.length);
    pool.push(made);
    parent.append(made.node);
  }
  while (pool.length > count) pool.pop().node.remove();
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function clockTime(seconds) {
  const whole = Math.floor(seconds);
  const two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${two(minutes)}:${two(whole % 60)}`;
}

function age(seconds) {
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : clockTime(seconds);
}

// How long a rank has been, or was, in its last collective or barrier. Neither: it raised there, or was stopped in it.
function timeIn(ranks, now, i) {
  if (!ranks.last[i]) return "";
  if (ranks.last_since[i] !== null) return age(Math.max(0, now - ranks.last_since[i]));
  return ranks.last_took[i] === null ? "not left" : age(ranks.last_took[i]);
}

function phaseWords(ranks, now, i) {
  // The age of a phase is news only when it lasts.
  const inPhase = ranks.phase_since[i] === null ? 0 : now - ranks.phase_since[i];
  return inPhase >= 1 ? age(inPhase) : "";
}

function lastWords(ranks, i) {
  return [ranks.last[i], ranks.last_number[i] && `#${ranks.last_number[i]}`].filter(Boolean).join(" ");
}

function pendingWords(ranks, now, i) {
  if (!ranks.pending[i]) return "";
  const since = ranks.pending_since[i] === null ? "" : `, ${age(Math.max(0, now - ranks.pending_since[i]))}`;
  return `${plural(ranks.pending[i], "handle")}, oldest ${ranks.pending_what[i]}${since}`;
}

const joined = (words) => words.filter(Boolean).join(" · ");

// Seconds since the start of the launch, by the page's own clock. Set by what the kernel says on arrival; the least
// delayed message is the best, so the offset only ever shrinks, unless a machine has slept and all is different.
class Clock {
  offset = null;

  set(now) {
    const offset = performance.now() / 1000 - now;
    if (this.offset === null || offset < this.offset || offset - this.offset > 2) this.offset = offset;
  }

  now(frame) {
    if (frame.elapsed !== null) return frame.elapsed;
    return this.offset === null ? frame.now : Math.max(0, performance.now() / 1000 - this.offset);
  }
}
