"""The page's half of the dashboard in a real Chromium: frames in, pictures and messages out. No kernel, no notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from nbstate import dashboard
from nbstate.dashboard import LaunchFacts, LaunchView, build_frame
from nbstate.telemetry.board import Board, Flag, Phase

pytestmark = pytest.mark.browser

SECOND = 1_000_000_000
STATIC = Path(dashboard.__file__).parent / "static"

# The part of anywidget's contract that the module uses: a model with one trait, events and messages.
HOST = """async ([source, frame]) => {
    const url = URL.createObjectURL(new Blob([source], {type: "text/javascript"}));
    const widget = (await import(url)).default();
    const bytes = (value) => new DataView(new TextEncoder().encode(JSON.stringify(value)).buffer);
    const on = {};
    window.sent = [];
    window.timers = 0;
    const [start, end] = [window.setInterval, window.clearInterval];
    window.setInterval = (...all) => { window.timers += 1; return start(...all); };
    window.clearInterval = (id) => { window.timers -= 1; end(id); };
    const model = {
        value: bytes(frame),
        get: () => model.value,
        on: (name, call) => { on[name] = call; },
        off: (name) => { delete on[name]; },
        send: (message) => window.sent.push(message),
    };
    window.update = (next) => { model.value = bytes(next); on["change:frame"](); };
    window.tell = (message) => on["msg:custom"](message);
    window.listeners = () => Object.keys(on).length;
    window.dispose = widget.render({model, el: document.getElementById("here")});
}"""


def frame_of(size: int = 2, state: str = "running", now: float = 41.0, **changes: Any) -> dict[str, Any]:
    """A frame of ranks in training, the last of which is late for barrier 7 if ``late``."""
    board = Board.create(size)
    late, step = changes.pop("late", False), changes.pop("step", 120)
    for rank in range(size):
        slot = board.slot(rank)
        slot.write(phase=Phase.RUNNING, phase_since=int(40 * SECOND), heartbeat=int(40 * SECOND), step=step)
        slot.write(flags=Flag.KNOWN | Flag.SYNC_GRADIENTS, sync_history=0b0101, sync_count=4)
        slot.write_text(device=f"cuda:{rank}")
        if late and rank < size - 1:
            slot.open_barrier(7, 38 * SECOND, "train.py", 14)
    facts = LaunchFacts("train", "In[5]", "fork", "local", size, 0)
    view = LaunchView(board.snapshot(), int(now * SECOND), state, **changes)  # type: ignore[arg-type]
    board.close()
    return {**build_frame(facts, view), "now": now}


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Render a frame in a page of a given width."""
    pages: list[Page] = []

    def render(frame: dict[str, Any], width: int = 1100, body: str = 'data-jp-theme-light="true"') -> Page:
        page = browser.new_page(viewport={"width": width, "height": 800})
        pages.append(page)
        page.on("pageerror", lambda error: pytest.fail(str(error)))
        style = (STATIC / "dashboard.css").read_text()
        page.set_content(f"<style>{style} body {{margin: 0}}</style><body {body}><div id=here></div></body>")
        page.evaluate(HOST, [(STATIC / "dashboard.js").read_text(), frame])
        return page

    yield render
    for page in pages:
        page.close()


def test_shows_header_verdict_barrier_and_ranks(show: Callable[..., Page]) -> None:
    page = show(frame_of(late=True))
    expect(page.get_by_role("heading", name="train")).to_be_visible()
    expect(page.locator(".nbs-facts")).to_have_text("2 ranks · fork · local · In[5] · 00:41")
    expect(page.locator(".nbs-sentence")).to_contain_text(
        re.compile(r"rank 1 is 3\.\d s late for barrier #7 \(train.py:14\)")
    )
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "1 of 2, missing: rank 1")
    expect(page.get_by_text("1 of 2", exact=True)).to_be_visible()
    rows = page.locator(".nbs-ranks tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_have_attribute("data-mark", "late")
    expect(rows.nth(1)).to_contain_text("▲")
    expect(page.get_by_role("img", name="last 4 steps: 2 synchronised")).to_have_count(2)


def test_clock_ticks_without_frames_and_stops_at_the_end(show: Callable[..., Page]) -> None:
    page = show(frame_of(late=True))
    assert page.evaluate("window.sent") == [{"kind": "hello"}]
    page.evaluate("window.tell({kind: 'clock', now: 65})")
    expect(page.locator(".nbs-facts")).to_contain_text("01:06")
    expect(page.locator(".nbs-info")).to_contain_text("waiting 28.")
    page.evaluate("frame => window.update(frame)", frame_of(state="stopped", now=70.0))
    expect(page.locator(".nbs-facts")).to_contain_text("01:10")
    assert page.evaluate("window.timers") == 0


def test_without_a_kernel_nothing_ticks(show: Callable[..., Page]) -> None:
    page = show(frame_of())  # a saved notebook: nobody answers the hello
    page.wait_for_timeout(1300)
    expect(page.locator(".nbs-facts")).to_contain_text("00:41")


def test_nodes_are_kept_from_frame_to_frame(show: Callable[..., Page]) -> None:
    page = show(frame_of(lines=[(0, "one")]))
    page.evaluate("document.querySelectorAll('.nbs *').forEach((node) => { node.kept = true; })")
    page.evaluate("frame => window.update(frame)", frame_of(step=121, lines=[(0, "one"), (1, "two")]))
    expect(page.locator(".nbs-c-step").nth(1)).to_have_text("121")
    new = page.evaluate("[...document.querySelectorAll('.nbs *')].filter((node) => !node.kept).map((n) => n.className)")
    assert new == ["nbs-line", "nbs-line-rank", ""]


def test_strings_are_text_never_markup(show: Callable[..., Page]) -> None:
    nasty = "<img src=x onerror='window.owned = 1'><script>window.owned = 1</script>"
    frame = frame_of(late=True, state="failed", message=nasty, lines=[(0, nasty), (1, f"\x1b[31m{nasty}\x1b[0m")])
    frame["title"] = frame["cell"] = frame["barrier"]["where"] = nasty
    frame["ranks"]["device"] = frame["ranks"]["phase_text"] = frame["ranks"]["last"] = [nasty, nasty]
    page = show(frame)
    page.wait_for_timeout(100)
    assert page.evaluate("window.owned") is None
    assert page.locator(".nbs img:not([role]), .nbs script").count() == 0
    expect(page.locator(".nbs-sentence")).to_have_text(nasty)
    expect(page.locator(".nbs-line .nbs-ansi-1")).to_have_text(nasty)


def test_buttons_send_once_and_say_why_when_over(show: Callable[..., Page]) -> None:
    page = show(frame_of())
    page.get_by_role("button", name="Interrupt").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.evaluate("window.sent.slice(1)") == [{"kind": "interrupt"}, {"kind": "stop"}]
    expect(page.get_by_role("button", name="Stopping…")).to_be_visible()
    page.evaluate("frame => window.update(frame)", frame_of(state="stopped"))
    over = page.get_by_role("button", name="Stop, unavailable: the launch is over (stopped)")
    expect(over).to_have_attribute("aria-disabled", "true")
    over.click(force=True)
    assert len(page.evaluate("window.sent")) == 3


def test_verdict_is_spoken_when_it_changes_not_when_it_ages(show: Callable[..., Page]) -> None:
    page = show(frame_of(late=True, now=40.2))
    spoken = page.get_by_role("status")
    expect(spoken).to_contain_text(re.compile(r"rank 1 is 2\.\d s late"))
    first = spoken.inner_text()
    page.evaluate("frame => window.update(frame)", frame_of(late=True, now=41.0))
    expect(page.locator(".nbs-sentence")).to_contain_text(re.compile(r"rank 1 is 3\.\d s late"))
    assert spoken.inner_text() == first
    page.evaluate("frame => window.update(frame)", frame_of(state="stopped"))
    expect(spoken).to_contain_text("stopped after")


def test_output_of_one_rank_by_keyboard(show: Callable[..., Page]) -> None:
    page = show(frame_of(lines=[(0, "from zero"), (1, "from one")]))
    page.get_by_role("tab", name="All ranks").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", selected=True)).to_be_focused()
    panel = page.get_by_role("tabpanel")
    expect(panel).to_have_text("nothing printed yetfrom one")
    expect(panel).to_have_attribute("aria-label", "Output of rank 1")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="All ranks")).to_be_focused()


def test_output_follows_its_end_unless_someone_reads(show: Callable[..., Page]) -> None:
    def lines(upto: int) -> list[tuple[int, str]]:
        return [(0, f"line {i}") for i in range(upto)]

    page = show(frame_of(lines=lines(60)))
    page.evaluate("frame => window.update(frame)", frame_of(lines=lines(70)))
    below = "panel => panel.scrollHeight - panel.scrollTop - panel.clientHeight"
    assert page.locator(".nbs-output").evaluate(below) < 2
    page.evaluate("document.querySelector('.nbs-output').scrollTop = 400")
    first_shown = """panel => {
        const top = panel.getBoundingClientRect().top;
        const lines = [...panel.querySelectorAll(".nbs-line")];
        return lines.find((line) => line.getBoundingClientRect().top >= top).textContent;
    }"""
    reading = page.locator(".nbs-output").evaluate(first_shown)
    page.evaluate("frame => window.update(frame)", frame_of(lines=lines(95)))
    assert page.locator(".nbs-output").evaluate(first_shown) == reading  # 15 lines left above it, 25 came below


def test_narrow_cells_drop_columns_from_the_right_and_stack_panels(show: Callable[..., Page]) -> None:
    order = ["memory", "took", "last", "strip", "sync", "epoch"]
    seen = []
    page = show(frame_of())
    for width in (1100, 900, 780, 600, 440, 360):
        page.set_viewport_size({"width": width, "height": 800})
        seen.append([key for key in order if not page.locator(f"thead .nbs-c-{key}").is_visible()])
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        history = page.locator(".nbs-part").first.bounding_box()
        output = page.locator(".nbs-output-part").bounding_box()
        assert history is not None
        assert output is not None
        assert (output["y"] > history["y"]) is (width < 720)
    assert seen == [order[:0], order[:1], order[:3], order[:4], order[:5], order[:6]]


@pytest.mark.parametrize(
    ("body", "scheme", "dark"),
    [
        ('data-jp-theme-light="true"', "dark", False),
        ('data-jp-theme-light="false"', "light", True),
        ('data-vscode-theme-kind="vscode-dark"', "light", True),
        ("", "light", False),
        ("", "dark", True),
    ],
)
def test_light_and_dark_follow_the_notebook_before_the_system(
    show: Callable[..., Page], body: str, scheme: Any, dark: bool
) -> None:
    page = show(frame_of(), body=body)
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate(
        "(() => { const s = getComputedStyle(document.querySelector('.nbs')); return [s.color, s.backgroundColor]; })()"
    )
    text, ground = (sum(int(n) for n in colour[4:-1].split(",")) for colour in colours)
    assert (text > ground) is dark


def test_heat_map_beyond_32_ranks(show: Callable[..., Page]) -> None:
    page = show(frame_of(size=33, late=True))
    expect(page.locator(".nbs-ranks table")).to_be_hidden()
    expect(page.get_by_role("option")).to_have_count(33)
    expect(page.locator(".nbs-detail")).to_contain_text("rank 32 · late")  # the guilty one, unless asked
    expect(page.locator(".nbs-legend")).to_contain_text("in barrier: 32")
    page.get_by_role("listbox").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".nbs-detail")).to_contain_text("rank 1 · cuda:1 · barrier #7")
    page.evaluate("frame => window.update(frame)", frame_of(size=33, late=True, step=121))
    expect(page.locator(".nbs-detail")).to_contain_text("rank 1 · cuda:1 · barrier #7")


def test_dispose_leaves_nothing(show: Callable[..., Page]) -> None:
    page = show(frame_of())
    assert page.evaluate("window.timers") == 1
    page.evaluate("window.dispose()")
    assert page.evaluate("[window.timers, window.listeners(), document.getElementById('here').children.length]") == [
        0,
        0,
        0,
    ]
