// The lower panels: the last barriers, the lines of output; and text that was asked for.

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

const PLAIN = { colour: null, rgb: null, bold: false, dim: false, italic: false, underline: false };

// A colour of the palette of 256 beyond the first sixteen: a cube of six levels, then greys.
function paletteColour(index) {
  if (index >= 232) return Array(3).fill(8 + 10 * (index - 232));
  const level = (value) => (value ? 55 + 40 * value : 0);
  const cube = index - 16;
  return [Math.floor(cube / 36), Math.floor(cube / 6) % 6, cube % 6].map(level);
}

// What one SGR sequence does to a style. The colours behind the text are left out.
function styled(style, codes) {
  const next = { ...style };
  const numbers = codes.split(";").map(Number);
  for (let i = 0; i < numbers.length; i += 1) {
    const code = numbers[i];
    if (code === 0) Object.assign(next, PLAIN);
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 22) Object.assign(next, { bold: false, dim: false });
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code >= 30 && code <= 37) Object.assign(next, { colour: code - 30, rgb: null });
    else if (code >= 90 && code <= 97) Object.assign(next, { colour: code - 90, rgb: null });
    else if (code === 39) Object.assign(next, { colour: null, rgb: null });
    else if (code === 38 || code === 48) {
      const indexed = numbers[i + 1] === 5;
      const given = indexed ? numbers[i + 2] : null;
      if (code === 38 && indexed && given < 16) Object.assign(next, { colour: given % 8, rgb: null });
      else if (code === 38 && indexed && given < 256) Object.assign(next, { colour: null, rgb: paletteColour(given) });
      else if (code === 38 && !indexed) Object.assign(next, { colour: null, rgb: numbers.slice(i + 2, i + 5) });
      i += indexed ? 2 : 4;
    }
  }
  return next;
}

function colouredSpan(style, text) {
  const flags = ["bold", "dim", "italic", "underline"].filter((name) => style[name]).map((name) => `nbs-${name}`);
  if (style.colour !== null) flags.push(`nbs-ansi-${style.colour}`);
  const span = make("span", flags.join(" "), {}, text);
  // Mixed with the colour of the text, which is legible on any ground.
  if (style.rgb) span.style.color = `color-mix(in srgb, rgb(${style.rgb.join(" ")}) 60%, var(--nbs-fg))`;
  return span;
}

function setColoured(node, text) {
  if (!text.includes("\x1b")) {
    setText(node, text);
    return;
  }
  // Text, codes, text, codes, ..., text: what split does with one group.
  const pieces = text.split(SGR);
  let style = PLAIN;
  const spans = [];
  pieces.forEach((piece, i) => {
    if (i % 2) style = styled(style, piece);
    else if (piece) spans.push(colouredSpan(style, piece));
  });
  node.replaceChildren(...spans);
}

// How many lines have left at the head since the last frame, so that those that stay keep their nodes: the shift by which
// most lines find themselves again. Not all do: bars at the end change, and new lines come before them.
function leftAtHead(before, after) {
  let [best, found] = [0, 0];
  for (let shift = 0; shift < before.length && before.length - shift > found; shift += 1) {
    let same = 0;
    const most = Math.min(before.length - shift, after.length);
    while (same < most && before[shift + same][0] === after[same][0] && before[shift + same][1] === after[same][1]) same += 1;
    if (same > found) [best, found] = [shift, same];
  }
  return best;
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
    let lines = frame.lines;
    if (key !== "all") {
      const tail = (frame.tails[only] ?? []).map((text) => [only, text]);
      lines = [...tail, ...frame.lines.filter(([rank]) => rank === only)];
    }
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
    const none = frame.elapsed === null ? "nothing printed yet" : "nothing was printed";
    setText(empty, key === "heat" && frame.lines.length ? "nothing among the last lines of all ranks" : none);
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

// Text that was asked for: stacks, a diagnosis. Stays until it is closed, or asked for again.
function textPane(id) {
  const title = make("strong", "", { id: `${id}-text` });
  const when = make("span", "nbs-muted");
  const close = make("button", "nbs-button", { type: "button", "aria-label": "Close this text" }, "Close");
  const body = make("pre", "nbs-text", { tabindex: "0", role: "region", "aria-labelledby": title.id });
  const head = make("div", "nbs-part-title", {}, title, when, close);
  const node = make("div", "nbs-text-part", {}, head, body);
  let opener = null;
  node.hidden = true;

  function shut() {
    const inside = node.contains(document.activeElement);
    node.hidden = true;
    if (inside) opener?.focus();
  }

  close.addEventListener("click", shut);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") shut();
  });
  return {
    node,
    open(message, moment, button) {
      const waiting = document.activeElement === button;
      opener = button;
      setText(title, message.title);
      setText(when, `at ${clockTime(moment)}`);
      setText(body, message.text || "nothing to show");
      node.hidden = false;
      body.scrollTop = 0;
      if (waiting) body.focus({ preventScroll: true }); // read out to whoever asked, if they have not gone on
      node.scrollIntoView?.({ block: "nearest" });
    },
  };
}
