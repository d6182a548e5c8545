// The ranks: a table of rows, or a heat map of cells, and the details of one.

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

function rankRow(i, id) {
  const cells = {};
  const node = make("tr");
  for (const [key, , kind] of COLUMNS) {
    const tag = key === "rank" ? "th" : "td";
    cells[key] = make(tag, `nbs-c-${key} ${kind && `nbs-${kind}`}`, tag === "th" ? { scope: "row" } : {});
    node.append(cells[key]);
  }
  const mark = make("span", "nbs-mark");
  const rank = make("button", "nbs-rank", { type: "button", "data-rank": i, "aria-controls": `${id}-detail` });
  cells.rank.append(mark, rank);
  const phase = make("span", "nbs-phase");
  const phaseAge = make("span", "nbs-muted nbs-age");
  cells.phase.append(make("span", "nbs-dot", { "aria-hidden": "true" }), phase, phaseAge);
  const chip = make("span", "nbs-chip");
  const end = make("span", "nbs-end nbs-muted");
  cells.sync.append(chip, end);
  const steps = strip();
  cells.strip.append(steps.node);
  const last = make("span");
  const lastNumber = make("span", "nbs-muted");
  cells.last.append(last, lastNumber);
  const used = make("span", "nbs-fill");
  const bar = make("span", "nbs-bar", { "aria-hidden": "true" }, used);
  const memory = make("span", "nbs-muted");
  cells.memory.append(bar, memory);
  const cpu = make("span", "nbs-muted");
  const use = make("span");
  cells.use.append(cpu, use);
  cells.what.classList.add("nbs-muted");

  return {
    node,
    button: rank,
    draw({ ranks, verdict }, i) {
      const guilty = ranks.mark[i];
      setAttribute(node, "data-mark", guilty);
      setAttribute(node, "data-phase", ranks.phase[i]);
      setText(mark, guilty ? verdict.symbol : "");
      setAttribute(mark, "title", guilty);
      setText(rank, String(ranks.rank[i]));
      setAttribute(rank, "aria-label", `Rank ${ranks.rank[i]}${guilty && `, ${guilty}`}: details`);
      setAttribute(cells.rank, "title", ranks.pid[i] ? `process ${ranks.pid[i]}` : null);
      setText(cells.device, ranks.device[i] || "–");
      setText(phase, ranks.phase_text[i]);
      setText(cells.step, String(ranks.step[i]));
      setText(cells.epoch, ranks.epoch[i] === null ? "–" : String(ranks.epoch[i]));
      const sync = ranks.sync[i];
      setText(chip, sync === null ? "–" : sync ? "sync" : "accumulate");
      setAttribute(chip, "data-sync", sync === null ? null : String(sync));
      setAttribute(chip, "title", ranks.detail[i]);
      const over = ranks.end[i];
      setText(end, over < 0 ? "" : over > 0 ? `end +${over}` : "end");
      setAttribute(end, "title", over < 0 ? null : `last batch of the loader${over > 0 ? `, remainder ${over}` : ""}`);
      steps.draw(ranks.strip[i]);
      setText(last, ranks.last[i] || "–");
      setAttribute(cells.last, "title", joined([ranks.last[i], ranks.last_what[i], ranks.last_where[i]]));
      setText(lastNumber, ranks.last_number[i] ? ` #${ranks.last_number[i]}` : "");
      const what = joined([ranks.last_what[i], ranks.pending[i] ? `${ranks.pending[i]} pending` : ""]);
      setText(cells.what, what || "–");
      setAttribute(cells.what, "title", what);
      const [device, own] = [ranks.device_use[i], ranks.cpu[i]];
      setText(cpu, device === null && own !== null ? "cpu " : "");
      setText(use, device !== null ? `${device} %` : own !== null ? `${own} %` : "–");
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
      setText(phaseAge, phaseWords(ranks, now, i));
    },
  };
}

// Everything that is known of one rank: what a row has no room for, and all of a cell of the heat map.
function rankDetail(id) {
  const title = make("strong");
  const list = make("dl", "nbs-pairs");
  const node = make("div", "nbs-detail", { id: `${id}-detail`, role: "group" }, title, list);
  const items = [];
  return {
    node,
    tick({ ranks }, now, i) {
      if (ranks.rank[i] === undefined) return;
      const use = [
        ranks.device_use[i] === null ? "" : `device ${ranks.device_use[i]} %`,
        ranks.cpu[i] === null ? "" : `cpu ${ranks.cpu[i]} %`,
      ];
      const flag = ranks.sync[i] === null ? "" : ranks.sync[i] ? "sync" : "accumulate";
      const pairs = [
        ["phase", joined([ranks.phase_text[i], phaseWords(ranks, now, i)])],
        ["step", String(ranks.step[i])],
        ["epoch", ranks.epoch[i] === null ? "" : String(ranks.epoch[i])],
        ["gradients", joined([flag, ranks.detail[i]])],
        ["last collective", joined([lastWords(ranks, i), ranks.last_what[i], ranks.last_where[i]])],
        ["time in it", timeIn(ranks, now, i)],
        ["not waited for", pendingWords(ranks, now, i)],
        ["device", ranks.device[i]],
        ["memory", ranks.memory[i]],
        ["util", use.filter(Boolean).join(", ")],
        ["process", ranks.pid[i] ? String(ranks.pid[i]) : ""],
      ].filter(([, value]) => value);
      const differs = ranks.differs[i].length ? `differs in ${ranks.differs[i].join(", ")}` : "";
      setText(title, joined([`rank ${i}`, ranks.mark[i], differs]));
      setAttribute(node, "aria-label", `Details of rank ${i}`);
      setCount(list, items, pairs.length, () => {
        const [label, value] = [make("dt"), make("dd")];
        return { node: make("div", "", {}, label, value), label, value };
      });
      pairs.forEach(([label, value], at) => {
        setText(items[at].label, label);
        setText(items[at].value, value);
      });
    },
  };
}

// How the ranks accumulate, and what their scalers have skipped.
function gradientLine() {
  const words = make("span");
  const node = make("div", "nbs-gradients nbs-muted", {}, make("span", "", {}, "gradients: "), words);
  return {
    node,
    draw({ gradients }) {
      setShown(node, gradients.length > 0);
      setText(words, joined(gradients));
    },
  };
}

// A row opens its details below the table, by click or by key; the arrow keys go from row to row.
function ranksTable(id, onOpen) {
  const head = make("tr");
  for (const [key, title, kind] of COLUMNS) {
    const cell = make("th", `nbs-c-${key} ${kind && `nbs-${kind}`}`, { scope: "col" }, make("span", "nbs-th", {}, title));
    if (key === "strip") cell.title = "tall: gradients synchronised; short: accumulated";
    head.append(cell);
  }
  const body = make("tbody");
  const table = make("table", "nbs-table", { "aria-label": "Ranks" }, make("thead", "", {}, head), body);
  const rows = [];
  let at = 0; // the row that the tab key comes to
  let open = -1;

  function choose(next) {
    open = next;
    rows.forEach((row, i) => {
      setAttribute(row.node, "data-open", i === open ? "true" : null);
      setAttribute(row.button, "aria-expanded", String(i === open));
      setAttribute(row.button, "tabindex", i === at ? "0" : "-1");
    });
    onOpen(open);
  }

  body.addEventListener("click", (event) => {
    const chosen = rows.findIndex((row) => row.node.contains(event.target));
    if (chosen < 0 || String(document.getSelection())) return; // whoever marks text to copy it wants no details
    at = chosen;
    choose(open === chosen ? -1 : chosen);
  });
  body.addEventListener("keydown", (event) => {
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Escape" && open >= 0) choose(-1);
    else if (to !== undefined) {
      at = Math.max(0, Math.min(rows.length - 1, to));
      choose(open < 0 ? -1 : at);
      rows[at].button.focus();
    } else return;
    event.preventDefault();
  });

  return {
    node: table,
    draw(frame) {
      const before = rows.length;
      setCount(body, rows, frame.ranks.rank.length, (i) => rankRow(i, id));
      if (rows.length !== before) choose(open);
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
  const node = make("div", "nbs-heat-part", {}, map, legend);
  const cells = [];
  let active = 0;
  let chosen = false;
  let frame = null;

  // Hundreds of names a frame would be work for nothing: a screen reader reads that of the active cell.
  function describe(i) {
    const { ranks } = frame;
    const name = `rank ${i}${ranks.mark[i] && `, ${ranks.mark[i]}`}: ${ranks.phase_text[i]}, step ${ranks.step[i]}`;
    setAttribute(cells[i].node, "aria-label", name);
  }

  function activate(rank) {
    if (!frame || rank < 0 || rank >= frame.world_size) return;
    cells[active]?.node.removeAttribute("aria-selected");
    active = rank;
    cells[active].node.setAttribute("aria-selected", "true");
    describe(active);
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
      cells.forEach((cell, i) => {
        const phase = ranks.phase[i];
        crowd.set(phase, (crowd.get(phase) ?? 0) + 1);
        const looks = `${phase} ${ranks.mark[i]} ${ranks.differs[i].length > 0}`;
        if (cell.looks === looks) return; // what most cells do, most of the time
        cell.looks = looks;
        setText(cell.node, PHASES[phase][0]);
        setAttribute(cell.node, "data-phase", phase);
        setAttribute(cell.node, "data-mark", ranks.mark[i]);
        setAttribute(cell.node, "data-differs", ranks.differs[i].length ? "true" : null);
        describe(i);
      });
      const parts = [...crowd].map(([phase, count]) => `${PHASES[phase][0]}  ${PHASES[phase][1]}: ${count}`);
      setText(legend, parts.join("     "));
      const guilty = ranks.mark.findIndex(Boolean);
      activate(chosen ? active : Math.max(0, guilty));
    },
  };
}
