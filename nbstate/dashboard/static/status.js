// Header, verdict and the newest barrier.

function header(onAction) {
  const title = make("span", "nbs-title", { role: "heading", "aria-level": "3" });
  const facts = make("span", "nbs-facts");
  const buttons = Object.entries(ACTIONS).map(([kind, action]) => {
    const node = make("button", "nbs-button", { type: "button", title: action.title }, action.label);
    const button = { kind, action, node, until: 0 };
    node.addEventListener("click", () => {
      if (node.getAttribute("aria-disabled") === "true") return;
      if (action.asks && performance.now() < button.until) return;
      button.until = performance.now() + (action.asks ? PATIENCE : PRESSED);
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
    // Whether this view has asked, and not another one of the same widget; and the button, to go back to.
    answered(kind) {
      const button = buttons.find((each) => each.kind === kind);
      if (!button || performance.now() >= button.until) return null;
      button.until = 0;
      pressed(button);
      return button.node;
    },
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
  const evidence = make("ul", "nbs-evidence");
  const words = make("div", "nbs-words", {}, make("div", "nbs-said", {}, word, sentence), evidence);
  const node = make("div", "nbs-verdict", {}, symbol, words, spoken);
  const items = [];
  let said = "";
  return {
    node,
    draw({ verdict }) {
      setAttribute(node, "data-kind", verdict.kind);
      setText(symbol, verdict.symbol);
      const sentence = verdict.sentence.toLowerCase();
      setText(word, sentence.startsWith(verdict.word) || sentence.endsWith(verdict.word) ? "" : verdict.word);
      setShown(word, word.textContent !== "");
      const facts = [...verdict.evidence, ...(verdict.lines.length ? [verdict.lines.join(" · ")] : [])];
      setCount(evidence, items, facts.length, () => ({ node: make("li") }));
      facts.forEach((fact, i) => setText(items[i].node, fact));
      setShown(evidence, facts.length > 0);
    },
    tick({ verdict }, now) {
      const waited = verdict.since === null ? "" : age(Math.max(0, now - verdict.since));
      const text = verdict.since === null ? verdict.sentence : verdict.sentence.replace("{age}", () => waited);
      setText(sentence, text);
      const saying = `${verdict.kind} ${verdict.ranks}`;
      if (saying === said) return;
      said = saying;
      setText(spoken, `${verdict.word}: ${text}`);
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
