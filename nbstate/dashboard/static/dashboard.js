// One view of one model: all parts together, its clock, and its messages.

let views = 0;

function decode(value) {
  if (!value || value.byteLength === 0) return null;
  return JSON.parse(new TextDecoder().decode(value));
}

function show({ model, el }, memory) {
  const id = `nbs-${(views += 1)}`;
  const clock = new Clock();
  let frame = null;
  const send = (kind) => {
    try {
      model.send({ kind });
    } catch {
      // A saved notebook without a kernel: the picture stands, nobody listens.
    }
  };

  const output = outputPart(id, memory);
  const history = historyPart();
  const detail = rankDetail(id);
  const gradients = gradientLine();
  const pane = textPane(id);
  let detailed = -1; // the rank whose details show

  function showDetail(rank) {
    detailed = rank;
    setShown(detail.node, rank >= 0);
    if (rank >= 0 && frame) detail.tick(frame, clock.now(frame), rank);
  }

  const table = ranksTable(id, showDetail);
  const heat = heatMap(id, (rank) => {
    showDetail(rank);
    output.followHeat(rank);
  });
  const ranks = make("div", "nbs-ranks", {}, table.node, heat.node, detail.node, gradients.node);
  const top = header(send);
  const parts = [top, verdictLine(), barrierLine()];
  // Lumino would take arrow keys, Enter and letters for the notebook's own shortcuts while the focus is in here.
  const root = make("section", "nbs", { "data-lm-suppress-shortcuts": "true", "aria-label": "nbstate dashboard" });
  const panels = make("div", "nbs-panels", {}, history.node, output.node);
  root.append(...parts.map((part) => part.node), ranks, pane.node, panels);
  el.classList.add("nbs-host");
  el.append(root);

  let timer = null;
  showDetail(-1);

  function tick() {
    if (!frame) return;
    const now = clock.now(frame);
    for (const part of parts) part.tick(frame, now);
    if (frame.world_size <= TABLE_ROWS) table.tick(frame, now);
    if (detailed >= 0) detail.tick(frame, now, detailed);
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
    setAttribute(root, "data-tone", frame.verdict.tone);
    setAttribute(root, "data-ended", frame.elapsed === null ? null : "true");
    setAttribute(root, "aria-label", `nbstate dashboard: ${frame.title}`);
    for (const part of [...parts, large ? heat : table, gradients, history, output]) part.draw(frame);
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
    } else if (message?.kind === "text" && frame) {
      const button = top.answered(message.of);
      if (button) pane.open(message, clock.now(frame), button);
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
