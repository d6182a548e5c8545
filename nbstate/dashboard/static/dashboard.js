// Draws frames of nbstate's dashboard. One frame in, the same nodes patched: nothing is built twice, so focus, selection
// and scroll positions survive ten frames a second. Strings go into the page as text nodes only, never as markup.
//
// Kernel to page: trait `frame`, utf-8 JSON (see model.py), and custom messages {kind: "clock", now}.
// Page to kernel: custom messages {kind: "interrupt" | "stop" | "hello"}.

const TABLE_ROWS = 32; // beyond this a heat map
const STRIP_STEPS = 48;
const STRIP_PITCH = 3; // pixels a step
const TICK = 200; // milliseconds between two looks at the clock
const PRESSED = 3000; // milliseconds a pressed button says so

const VERDICTS = {
  starting: ["…", "starting"],
  well: ["●", "all well"],
  late: ["▲", "late"],
  missing: ["▲", "missing"],
  mismatch: ["◆", "mismatch"],
  finished: ["✓", "finished"],
  failed: ["✕", "failed"],
  interrupted: ["■", "interrupted"],
  stopped: ["■", "stopped"],
  unknown: ["?", "unclear"],
};

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
  ["memory", "memory", ""],
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


function header(onAction) {
  const title = make("span", "nbs-title", { role: "heading", "aria-level": "3" });
  const facts = make("span", "nbs-facts");
  const buttons = Object.entries(ACTIONS).map(([kind, action]) => {
    const node = make("button", "nbs-button", { type: "button", title: action.title }, action.label);
    const button = { kind, action, node, until: 0 };
    node.addEventListener("click", () => {
      if (node.getAttribute("aria-disabled") === "true") return;
      button.until = performance.now() + PRESSED;
      onAction(kind);
      pressed(button);
    });
    return button;
  });
  const controls = make("span", "nbs-controls", { role: "group", "aria-label": "Controls" });
  controls.append(...buttons.map((button) => button.node));
  const node = make("div", "nbs-head", {}, title, facts, controls);

  function pressed(button) {
    setText(button.node, performance.now() < button.until ? button.action.pressed : button.action.label);
  }

  return {
    node,
    draw(frame) {
      setText(title, frame.title);
      const ended = frame.elapsed !== null;
      for (const button of buttons) {
        const offered = frame.actions.includes(button.kind);
        setShown(button.node, offered || ended);
        if (ended) button.until = 0;
        // Not `disabled`: a screen reader should still find the button and hear why it does nothing.
        setAttribute(button.node, "aria-disabled", offered ? null : "true");
        const why = offered ? null : `${button.action.label}, unavailable: the launch is over (${frame.state})`;
        setAttribute(button.node, "aria-label", why);
        setAttribute(button.node, "title", offered ? button.action.title : `The launch is over (${frame.state})`);
      }
    },
    tick(frame, now) {
      const size = plural(frame.world_size, "rank");
      setText(facts, joined([size, frame.start_method, frame.engine, frame.cell, clockTime(now)]));
      for (const button of buttons) pressed(button);
    },
  };
}

function verdictLine() {
  const symbol = make("span", "nbs-symbol", { "aria-hidden": "true" });
  const word = make("span", "nbs-word");
  const sentence = make("span", "nbs-sentence");
  // Spoken when the verdict changes, not each time the seconds in its sentence do.
  const spoken = make("span", "nbs-spoken", { role: "status", "aria-live": "polite" });
  const node = make("div", "nbs-verdict", {}, symbol, word, sentence, spoken);
  let said = "";
  return {
    node,
    draw({ verdict }) {
      const [sign, name] = VERDICTS[verdict.kind] ?? VERDICTS.unknown;
      setAttribute(node, "data-kind", verdict.kind);
      setText(symbol, sign);
      setText(word, verdict.sentence.toLowerCase().startsWith(name) ? "" : name);
      setShown(word, word.textContent !== "");
    },
    tick({ verdict }, now) {
      const [, name] = VERDICTS[verdict.kind] ?? VERDICTS.unknown;
      const waited = verdict.since === null ? "" : age(Math.max(0, now - verdict.since));
      const text = verdict.since === null ? verdict.sentence : verdict.sentence.replace("{age}", () => waited);
      setText(sentence, text);
      const saying = `${verdict.kind} ${verdict.ranks}`;
      if (saying === said) return;
      said = saying;
      setText(spoken, `${name}: ${text}`);
    },
  };
}

function barrierLine() {
  const number = make("span", "nbs-muted");
  const count = make("strong");
  const bar = make("div", "nbs-segments", { role: "progressbar", "aria-valuemin": "0" });
  const fill = make("span", "nbs-fill");
  const info = make("span", "nbs-info nbs-muted");
  const node = make("div", "nbs-barrier", {}, make("span", "nbs-count", {}, number, " ", count), bar, info);
  const segments = [];
  return {
    node,
    draw(frame) {
      const barrier = frame.barrier;
      setShown(node, barrier !== null);
      if (barrier === null) return;
      setText(number, `barrier #${barrier.number}`);
      setText(count, `${barrier.arrived} of ${frame.world_size}`);
      setAttribute(node, "data-open", barrier.open ? "true" : "false");
      const small = frame.world_size <= TABLE_ROWS;
      setCount(bar, segments, small ? frame.world_size : 0, () => ({ node: make("span", "nbs-segment") }));
      if (small) {
        const missing = new Set(barrier.missing);
        segments.forEach((segment, rank) => {
          setAttribute(segment.node, "data-missing", missing.has(rank) ? "true" : null);
          setAttribute(segment.node, "title", `rank ${rank}${missing.has(rank) ? ": not yet here" : ""}`);
        });
      } else {
        if (!fill.isConnected) bar.append(fill);
        fill.style.width = `${(100 * barrier.arrived) / frame.world_size}%`;
      }
      setAttribute(bar, "aria-label", `ranks in barrier ${barrier.number}`);
      setAttribute(bar, "aria-valuemax", frame.world_size);
      setAttribute(bar, "aria-valuenow", barrier.arrived);
      const all = barrier.open ? `, missing: ${barrier.missing_text}` : "";
      setAttribute(bar, "aria-valuetext", `${barrier.arrived} of ${frame.world_size}${all}`);
    },
    tick(frame, now) {
      const barrier = frame.barrier;
      if (barrier === null) return;
      const words = barrier.open
        ? [`missing: ${barrier.missing_text}`, `${frame.elapsed === null ? "waiting" : "waited"} ${age(Math.max(0, now - barrier.since))}`, barrier.where]
        : [`spread ${age(barrier.spread)}`, `rank ${barrier.last} last`, barrier.where];
      setText(info, joined(words));
    },
  };
}

function strip() {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const paths = ["nbs-accumulated", "nbs-synced"].map((name) => {
    const path = document.createElementNS(space, "path");
    path.setAttribute("class", name);
    svg.append(path);
    return path;
  });
  const width = STRIP_STEPS * STRIP_PITCH;
  svg.setAttribute("class", "nbs-strip");
  svg.setAttribute("viewBox", `0 0 ${width} 12`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", 12);
  svg.setAttribute("role", "img");
  let drawn = null;
  return {
    node: svg,
    draw(steps) {
      if (steps === drawn) return;
      drawn = steps;
      const lines = ["", ""];
      const first = STRIP_STEPS - steps.length; // the newest step is always at the right end
      for (let i = 0; i < steps.length; i += 1) {
        const x = (first + i) * STRIP_PITCH + 1;
        // Tall for synchronised, short for accumulated: told by height, and by colour.
        if (steps[i] === "1") lines[1] += `M${x} 0V12`;
        else lines[0] += `M${x} 8V12`;
      }
      paths.forEach((path, i) => path.setAttribute("d", lines[i]));
      const synced = steps.split("1").length - 1;
      svg.setAttribute("aria-label", `last ${plural(steps.length, "step")}: ${synced} synchronised`);
    },
  };
}

function rankRow() {
  const cells = {};
  const node = make("tr");
  for (const [key, , kind] of COLUMNS) {
    const tag = key === "rank" ? "th" : "td";
    cells[key] = make(tag, `nbs-c-${key} ${kind && `nbs-${kind}`}`, tag === "th" ? { scope: "row" } : {});
    node.append(cells[key]);
  }
  const mark = make("span", "nbs-mark");
  const rank = make("span");
  cells.rank.append(mark, rank);
  const phase = make("span", "nbs-phase");
  const phaseAge = make("span", "nbs-muted nbs-age");
  cells.phase.append(make("span", "nbs-dot", { "aria-hidden": "true" }), phase, phaseAge);
  const chip = make("span", "nbs-chip");
  cells.sync.append(chip);
  const steps = strip();
  cells.strip.append(steps.node);
  const last = make("span");
  const lastNumber = make("span", "nbs-muted");
  cells.last.append(last, lastNumber);
  const used = make("span", "nbs-fill");
  const bar = make("span", "nbs-bar", { "aria-hidden": "true" }, used);
  const memory = make("span", "nbs-muted");
  cells.memory.append(bar, memory);

  return {
    node,
    draw({ ranks }, i) {
      const guilty = ranks.mark[i];
      setAttribute(node, "data-mark", guilty);
      setAttribute(node, "data-phase", ranks.phase[i]);
      setText(mark, guilty ? VERDICTS[guilty][0] : "");
      setAttribute(mark, "title", guilty);
      setText(rank, String(ranks.rank[i]));
      setAttribute(cells.rank, "title", ranks.pid[i] ? `process ${ranks.pid[i]}` : null);
      setText(cells.device, ranks.device[i] || "–");
      setText(phase, ranks.phase_text[i]);
      setText(cells.step, String(ranks.step[i]));
      setText(cells.epoch, ranks.epoch[i] === null ? "–" : String(ranks.epoch[i]));
      const sync = ranks.sync[i];
      setText(chip, sync === null ? "–" : sync ? "sync" : "accumulate");
      setAttribute(chip, "data-sync", sync === null ? null : String(sync));
      setAttribute(chip, "title", ranks.detail[i]);
      steps.draw(ranks.strip[i]);
      setText(last, ranks.last[i] || "–");
      setAttribute(cells.last, "title", ranks.last[i]);
      setText(lastNumber, ranks.last_number[i] ? ` #${ranks.last_number[i]}` : "");
      const share = ranks.memory_share[i];
      setShown(bar, share !== null);
      if (share !== null) used.style.width = `${Math.min(100, share)}%`;
      setText(memory, ranks.memory[i] || "–");
      for (const key of ["step", "epoch", "sync"]) {
        setAttribute(cells[key], "data-differs", ranks.differs[i].includes(key) ? "true" : null);
      }
    },
    tick({ ranks }, now, i) {
      setText(cells.took, timeIn(ranks, now, i) || "–");
      setAttribute(cells.took, "data-open", ranks.last_since[i] === null ? null : "true");
      // The age of a phase is news only when it lasts.
      const inPhase = ranks.phase_since[i] === null ? 0 : now - ranks.phase_since[i];
      setText(phaseAge, inPhase >= 1 ? age(inPhase) : "");
    },
  };
}

function ranksTable() {
  const head = make("tr");
  for (const [key, title, kind] of COLUMNS) {
    const cell = make("th", `nbs-c-${key} ${kind && `nbs-${kind}`}`, { scope: "col" }, make("span", "nbs-th", {}, title));
    if (key === "strip") cell.title = "tall: gradients synchronised; short: accumulated";
    head.append(cell);
  }
  const body = make("tbody");
  const table = make("table", "nbs-table", { "aria-label": "Ranks" }, make("thead", "", {}, head), body);
  const rows = [];
  return {
    node: table,
    draw(frame) {
      setCount(body, rows, frame.ranks.rank.length, rankRow);
      rows.forEach((row, i) => row.draw(frame, i));
    },
    tick(frame, now) {
      rows.forEach((row, i) => row.tick(frame, now, i));
    },
  };
}

// One cell a rank; the row of the cell under the pointer or the keyboard's is written out below.
function heatMap(id, onActive) {
  const map = make("div", "nbs-heat", { role: "listbox", tabindex: "0", "aria-label": "Ranks" });
  const legend = make("div", "nbs-legend nbs-muted");
  const detail = make("div", "nbs-detail");
  const node = make("div", "nbs-heat-part", {}, map, legend, detail);
  const cells = [];
  let active = 0;
  let chosen = false;
  let frame = null;

  function activate(rank) {
    if (!frame || rank < 0 || rank >= frame.world_size) return;
    cells[active]?.node.removeAttribute("aria-selected");
    active = rank;
    cells[active].node.setAttribute("aria-selected", "true");
    map.setAttribute("aria-activedescendant", cells[active].node.id);
    onActive(active);
  }

  const choose = (rank) => {
    chosen = true;
    activate(rank);
  };
  map.addEventListener("pointerover", (event) => {
    if (event.target.dataset.rank !== undefined) choose(Number(event.target.dataset.rank));
  });
  map.addEventListener("keydown", (event) => {
    const perRow = getComputedStyle(map).gridTemplateColumns.split(" ").length;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow };
    if (event.key in moves) choose(active + moves[event.key]);
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(cells.length - 1);
    else return;
    event.preventDefault();
  });

  return {
    node,
    draw(next) {
      frame = next;
      const { ranks } = frame;
      setCount(map, cells, ranks.rank.length, (i) => ({
        node: make("span", "nbs-cell", { role: "option", id: `${id}-${i}`, "data-rank": i }),
      }));
      const crowd = new Map();
      cells.forEach(({ node: cell }, i) => {
        const phase = ranks.phase[i];
        crowd.set(phase, (crowd.get(phase) ?? 0) + 1);
        setText(cell, PHASES[phase][0]);
        setAttribute(cell, "data-phase", phase);
        setAttribute(cell, "data-mark", ranks.mark[i]);
        setAttribute(cell, "data-differs", ranks.differs[i].length ? "true" : null);
        const name = `rank ${i}${ranks.mark[i] && `, ${ranks.mark[i]}`}: ${ranks.phase_text[i]}, step ${ranks.step[i]}`;
        setAttribute(cell, "aria-label", name);
      });
      const parts = [...crowd].map(([phase, count]) => `${PHASES[phase][0]}  ${PHASES[phase][1]}: ${count}`);
      setText(legend, parts.join("     "));
      const guilty = ranks.mark.findIndex(Boolean);
      activate(chosen ? active : Math.max(0, guilty));
    },
    tick({ ranks }, now) {
      const i = active;
      if (ranks.rank[i] === undefined) return;
      const inPhase = ranks.phase_since[i] === null ? 0 : now - ranks.phase_since[i];
      const words = [
        `rank ${i}`,
        ranks.mark[i],
        ranks.device[i],
        ranks.phase_text[i] + (inPhase >= 1 ? ` ${age(inPhase)}` : ""),
        `step ${ranks.step[i]}`,
        ranks.epoch[i] === null ? "" : `epoch ${ranks.epoch[i]}`,
        ranks.sync[i] === null ? "" : ranks.sync[i] ? "sync" : "accumulate",
        ranks.last[i] && [ranks.last[i], ranks.last_number[i] && `#${ranks.last_number[i]}`, timeIn(ranks, now, i)].filter(Boolean).join(" "),
        ranks.memory[i],
      ];
      setText(detail, joined(words));
    },
  };
}

function historyPart() {
  const note = make("span", "nbs-muted");
  const empty = make("div", "nbs-empty nbs-muted", {}, "none yet");
  const body = make("tbody");
  const heads = [["no.", "num"], ["where", ""], ["spread", ""], ["last", "num"]].map(([title, kind]) =>
    make("th", kind && `nbs-${kind}`, { scope: "col" }, make("span", "nbs-th", {}, title)),
  );
  const head = make("thead", "", {}, make("tr", "", {}, ...heads));
  const table = make("table", "nbs-table nbs-history", { "aria-label": "Last barriers" }, head, body);
  const title = make("div", "nbs-part-title", {}, make("strong", "", {}, "Barriers"), note);
  const node = make("div", "nbs-part", {}, title, empty, table);
  const rows = [];

  function row() {
    const number = make("td", "nbs-num");
    const where = make("td", "nbs-where");
    const fill = make("span", "nbs-fill");
    const spread = make("span", "nbs-spread-text");
    const last = make("td", "nbs-num");
    const bar = make("span", "nbs-bar nbs-spread", { "aria-hidden": "true" }, fill);
    return { node: make("tr", "", {}, number, where, make("td", "", {}, bar, spread), last), number, where, fill, spread, last };
  }

  return {
    node,
    draw({ history, straggler, elapsed }) {
      setText(note, straggler ? `rank ${straggler.rank} was last in ${straggler.times} of ${straggler.of}` : "");
      setText(empty, elapsed === null ? "none yet" : "none");
      setShown(empty, history.length === 0);
      setShown(table, history.length > 0);
      setCount(body, rows, history.length, row);
      const widest = Math.max(0.01, ...history.map((meeting) => meeting.spread));
      history.forEach((meeting, i) => {
        setText(rows[i].number, `#${meeting.number}`);
        setText(rows[i].where, meeting.where || "–");
        setAttribute(rows[i].where, "title", meeting.where);
        rows[i].fill.style.width = `${(100 * meeting.spread) / widest}%`;
        setText(rows[i].spread, age(meeting.spread));
        setText(rows[i].last, `rank ${meeting.last}`);
      });
    },
  };
}

const SGR = /\x1b\[([0-9;]*)m/;

// What one SGR sequence does to a style: weight and the sixteen colours of the text. The rest is left out.
function styled(style, codes) {
  const next = { ...style };
  const numbers = codes.split(";").map(Number);
  for (let i = 0; i < numbers.length; i += 1) {
    const code = numbers[i];
    if (code === 0) Object.assign(next, { bold: false, colour: null });
    else if (code === 1) next.bold = true;
    else if (code === 22) next.bold = false;
    else if (code >= 30 && code <= 37) next.colour = code - 30;
    else if (code >= 90 && code <= 97) next.colour = code - 90;
    else if (code === 39) next.colour = null;
    else if (code === 38 || code === 48) {
      const indexed = numbers[i + 1] === 5;
      if (code === 38 && indexed && numbers[i + 2] < 16) next.colour = numbers[i + 2] % 8;
      i += indexed ? 2 : 4; // the colours of a palette of 256 or of RGB follow
    }
  }
  return next;
}

function setColoured(node, text) {
  if (!text.includes("\x1b")) {
    setText(node, text);
    return;
  }
  // Text, codes, text, codes, ..., text: what split does with one group.
  const pieces = text.split(SGR);
  let style = { bold: false, colour: null };
  const spans = [];
  pieces.forEach((piece, i) => {
    if (i % 2) style = styled(style, piece);
    else if (piece) {
      const classes = [style.bold && "nbs-bold", style.colour !== null && `nbs-ansi-${style.colour}`];
      spans.push(make("span", classes.filter(Boolean).join(" "), {}, piece));
    }
  });
  node.replaceChildren(...spans);
}

// How many lines have left at the head since the last frame, so that those that stay keep their nodes.
function leftAtHead(before, after) {
  for (let shift = 0; shift < before.length; shift += 1) {
    let same = 0;
    const most = Math.min(before.length - shift, after.length);
    while (same < most && before[shift + same][0] === after[same][0] && before[shift + same][1] === after[same][1]) same += 1;
    if (same === most) return shift;
  }
  return 0;
}

function outputPart(id, memory) {
  const tabs = make("div", "nbs-tabs", { role: "tablist", "aria-label": "Output of" });
  const panel = make("div", "nbs-output", { role: "tabpanel", tabindex: "0", id: `${id}-output` });
  const empty = make("div", "nbs-muted", {}, "nothing printed yet");
  const list = make("div");
  panel.append(empty, list);
  const node = make("div", "nbs-part nbs-output-part", {}, tabs, panel);
  const buttons = [];
  const rows = [];
  let shown = [];
  let frame = null;
  let heatRank = 0;

  // The choice outlives a view: a widget may be shown in several places, and again later.
  const choice = () => memory.output ?? "all";
  const keys = () => {
    if (!frame) return [];
    return frame.world_size <= TABLE_ROWS ? ["all", ...Array(frame.world_size).keys()] : ["all", "heat"];
  };

  function select(key, focus) {
    memory.output = key;
    drawTabs();
    if (focus) buttons[keys().indexOf(key)].node.focus();
    drawLines();
    panel.scrollTop = panel.scrollHeight;
  }

  tabs.addEventListener("keydown", (event) => {
    const all = keys();
    const at = all.indexOf(choice());
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(all[(to + all.length) % all.length], true);
  });

  function drawTabs() {
    const all = keys();
    if (!all.includes(choice())) memory.output = "all";
    setCount(tabs, buttons, all.length, (i) => {
      const button = make("button", "nbs-tab", { type: "button", role: "tab", "aria-controls": panel.id });
      button.addEventListener("click", () => select(keys()[i], false));
      return { node: button };
    });
    all.forEach((key, i) => {
      const button = buttons[i].node;
      setText(button, key === "all" ? "All ranks" : key === "heat" ? `Rank ${heatRank}` : String(key));
      setAttribute(button, "aria-label", typeof key === "number" ? `Rank ${key}` : null);
      setAttribute(button, "aria-selected", String(key === choice()));
      setAttribute(button, "tabindex", key === choice() ? "0" : "-1");
      const whose = key === "all" ? "all ranks" : `rank ${key === "heat" ? heatRank : key}`;
      if (key === choice()) setAttribute(panel, "aria-label", `Output of ${whose}`);
    });
  }

  function drawLines() {
    const key = choice();
    const only = key === "heat" ? heatRank : key;
    const lines = key === "all" ? frame.lines : frame.lines.filter(([rank]) => rank === only);
    const atEnd = panel.scrollHeight - panel.scrollTop - panel.clientHeight < 8;
    const left = leftAtHead(shown, lines);
    if (left > 0) {
      const gone = rows.splice(0, left);
      const height = rows.length ? rows[0].node.offsetTop - gone[0].node.offsetTop : 0;
      gone.forEach((row) => row.node.remove());
      if (!atEnd) panel.scrollTop -= height; // what is being read stays where it is
    }
    setCount(list, rows, lines.length, () => {
      const rank = make("span", "nbs-line-rank");
      const text = make("span");
      return { node: make("div", "nbs-line", {}, rank, text), rank, text, drawn: null };
    });
    lines.forEach(([rank, text], i) => {
      setText(rows[i].rank, key === "all" ? `[${rank}] ` : "");
      if (rows[i].drawn !== text) {
        rows[i].drawn = text;
        setColoured(rows[i].text, text);
      }
    });
    shown = lines;
    setShown(empty, lines.length === 0);
    setText(empty, frame.elapsed === null ? "nothing printed yet" : "nothing was printed");
    if (atEnd) panel.scrollTop = panel.scrollHeight;
  }

  // Nodes are filled before they are in the page, where nothing can be scrolled yet.
  const arrival = new ResizeObserver(() => {
    if (panel.clientHeight === 0) return;
    panel.scrollTop = panel.scrollHeight;
    arrival.disconnect();
  });
  arrival.observe(panel);

  return {
    node,
    dispose: () => arrival.disconnect(),
    draw(next) {
      frame = next;
      drawTabs();
      drawLines();
    },
    followHeat(rank) {
      if (rank === heatRank) return;
      heatRank = rank;
      if (!frame) return;
      drawTabs();
      if (choice() === "heat") drawLines();
    },
  };
}


let views = 0;

function decode(value) {
  if (!value || value.byteLength === 0) return null;
  return JSON.parse(new TextDecoder().decode(value));
}

function show({ model, el }, memory) {
  const id = `nbs-${(views += 1)}`;
  const clock = new Clock();
  const send = (kind) => {
    try {
      model.send({ kind });
    } catch {
      // A saved notebook without a kernel: the picture stands, nobody listens.
    }
  };

  const output = outputPart(id, memory);
  const history = historyPart();
  const table = ranksTable();
  const heat = heatMap(id, (rank) => output.followHeat(rank));
  const ranks = make("div", "nbs-ranks", {}, table.node, heat.node);
  const parts = [header(send), verdictLine(), barrierLine()];
  // Lumino would take arrow keys, Enter and letters for the notebook's own shortcuts while the focus is in here.
  const root = make("section", "nbs", { "data-lm-suppress-shortcuts": "true", "aria-label": "nbstate dashboard" });
  root.append(...parts.map((part) => part.node), ranks, make("div", "nbs-panels", {}, history.node, output.node));
  el.classList.add("nbs-host");
  el.append(root);

  let frame = null;
  let timer = null;

  function tick() {
    if (!frame) return;
    const now = clock.now(frame);
    const drawn = frame.world_size > TABLE_ROWS ? heat : table;
    for (const part of [...parts, drawn]) part.tick?.(frame, now);
  }

  function draw(fresh) {
    const next = decode(model.get("frame"));
    if (!next) return;
    frame = next;
    if (fresh) clock.set(frame.now);
    const large = frame.world_size > TABLE_ROWS;
    setShown(table.node, !large);
    setShown(heat.node, large);
    setAttribute(root, "data-state", frame.state);
    setAttribute(root, "data-ended", frame.elapsed === null ? null : "true");
    setAttribute(root, "aria-label", `nbstate dashboard: ${frame.title}`);
    for (const part of [...parts, large ? heat : table, history, output]) part.draw(frame);
    tick();
    const live = frame.elapsed === null;
    if (live && timer === null) timer = setInterval(tick, TICK);
    if (!live && timer !== null) {
      clearInterval(timer);
      timer = null;
    }
  }

  const onFrame = () => draw(true);

  function onMessage(message) {
    if (message?.kind === "clock") {
      clock.set(message.now);
      tick();
    }
  }

  model.on("change:frame", onFrame);
  model.on("msg:custom", onMessage);
  draw(false); // how old this frame is, nobody knows: the clock waits for the answer to "hello"
  if (frame && frame.elapsed === null) send("hello");

  return () => {
    if (timer !== null) clearInterval(timer);
    model.off("change:frame", onFrame);
    model.off("msg:custom", onMessage);
    output.dispose();
    root.remove();
  };
}

// A function, so that each model has its own memory, which outlives its views.
export default () => {
  const memory = {};
  return { render: (context) => show(context, memory) };
};
