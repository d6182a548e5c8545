"""The page's half of the dashboard in a real Chromium: frames in, pictures and messages out. No kernel, no notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from nbstate import dashboard
from nbstate.dashboard import LaunchFacts, LaunchView, Utilisation, build_frame
from nbstate.dashboard.widget import SCRIPT
from nbstate.telemetry.board import Board, Flag, Phase
from nbstate.telemetry.diagnosis import Verdict

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
        page.evaluate(HOST, [SCRIPT, frame])
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
    frame["ranks"]["last_what"] = frame["ranks"]["last_where"] = frame["ranks"]["detail"] = [nasty, nasty]
    frame["verdict"]["evidence"] = frame["verdict"]["lines"] = frame["gradients"] = [nasty]
    frame["actions"] = ["stacks"]
    page = show(frame)
    page.get_by_role("button", name="Stacks").click()
    page.evaluate("text => window.tell({kind: 'text', of: 'stacks', title: text, text})", nasty)
    expect(page.locator(".nbs-text")).to_have_text(nasty)
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


def test_a_bar_at_the_end_does_not_move_what_is_being_read(show: Callable[..., Page]) -> None:
    def frame(upto: int) -> dict[str, Any]:
        return frame_of(lines=[*((0, f"line {i}") for i in range(upto)), (1, f"{upto} %")])

    page = show(frame(95))
    panel = page.locator(".nbs-output")
    panel.evaluate("panel => { panel.scrollTop = 300; }")
    first_shown = """panel => [...panel.querySelectorAll(".nbs-line")]
        .find((line) => line.getBoundingClientRect().top >= panel.getBoundingClientRect().top).textContent"""
    reading = panel.evaluate(first_shown)
    page.evaluate("frame => window.update(frame)", frame(100))
    assert panel.evaluate(first_shown) == reading
    expect(panel).to_contain_text("100 %")


def test_lines_of_a_quiet_rank_are_in_its_pane(show: Callable[..., Page]) -> None:
    page = show(frame_of(lines=[(1, "quiet"), *((0, f"noise {i}") for i in range(200))]))
    expect(page.get_by_role("tabpanel")).not_to_contain_text("quiet")
    page.get_by_role("tab", name="Rank 1").click()
    expect(page.get_by_role("tabpanel")).to_contain_text("quiet")


def test_colours_are_spans(show: Callable[..., Page]) -> None:
    text = "\x1b[1;32mok\x1b[0m \x1b[38;5;208mpalette\x1b[0m \x1b[38;2;10;20;30mrgb\x1b[39m \x1b[2;3;4mlow\x1b[0m end"
    page = show(frame_of(lines=[(0, text)]))
    line = page.locator(".nbs-line")
    expect(line).to_have_text("[0] ok palette rgb low end")
    styles = line.locator("span span").evaluate_all(
        "spans => spans.map((s) => [s.textContent, s.className, s.style.color])"
    )
    assert [style for style in styles if style[0].strip() and style[0] != " end"] == [
        ["ok", "nbs-bold nbs-ansi-2", ""],
        ["palette", "", "color-mix(in srgb, rgb(255 135 0) 60%, var(--nbs-fg))"],
        ["rgb", "", "color-mix(in srgb, rgb(10 20 30) 60%, var(--nbs-fg))"],
        ["low", "nbs-dim nbs-italic nbs-underline", ""],
    ]


def test_narrow_cells_drop_columns_from_the_right_and_stack_panels(show: Callable[..., Page]) -> None:
    order = ["what", "use", "memory", "took", "last", "strip", "sync", "epoch"]
    seen = []
    page = show(frame_of())
    for width in (1300, 1100, 1000, 900, 780, 600, 440, 360):
        page.set_viewport_size({"width": width, "height": 800})
        seen.append([key for key in order if not page.locator(f"thead .nbs-c-{key}").is_visible()])
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        history = page.locator(".nbs-part").first.bounding_box()
        output = page.locator(".nbs-output-part").bounding_box()
        assert history is not None
        assert output is not None
        assert (output["y"] > history["y"]) is (width < 820)
    assert seen == [order[:n] for n in (0, 1, 2, 3, 5, 6, 7, 8)]


def test_twice_the_size_of_text_is_half_the_room(show: Callable[..., Page]) -> None:
    page = show(frame_of(), width=1100, body='data-jp-theme-light="true" style="--jp-ui-font-size1: 26px"')
    assert page.evaluate("document.documentElement.scrollWidth") <= 1100
    shown = [key for key in ("sync", "strip", "memory") if page.locator(f"thead .nbs-c-{key}").is_visible()]
    assert shown == ["sync"]
    cut_off = """[...document.querySelectorAll('.nbs-ranks :is(th, td)')]
        .filter((cell) => cell.offsetWidth && cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"""
    assert page.evaluate(cut_off) == []


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
    detail = page.get_by_role("group", name="Details of rank 1")
    expect(detail).to_contain_text("barrier #7")
    expect(detail).to_contain_text("cuda:1")
    page.evaluate("frame => window.update(frame)", frame_of(size=33, late=True, step=121))
    expect(detail).to_contain_text("step121")
    page.get_by_role("option").nth(20).hover()
    expect(page.get_by_role("group", name="Details of rank 20")).to_contain_text("cuda:20")


def test_a_row_opens_its_details_by_keyboard_and_by_click(show: Callable[..., Page]) -> None:
    frame = frame_of(late=True, utilisation={0: Utilisation(180.4, 97.6)})
    frame["ranks"]["last_what"][0] = "4x8 float32 · of ranks 0 and 2"
    frame["ranks"]["pending"][0], frame["ranks"]["pending_what"][0] = 2, "irecv (In[5], line 9)"
    frame["ranks"]["pending_since"][0] = 38.0
    page = show(frame)
    expect(page.locator(".nbs-detail")).to_be_hidden()
    first = page.get_by_role("button", name="Rank 0: details")
    first.focus()
    page.keyboard.press("Enter")
    expect(first).to_have_attribute("aria-expanded", "true")
    detail = page.get_by_role("group", name="Details of rank 0")
    for said in (
        "4x8 float32 · of ranks 0 and 2",
        "2 handles, oldest irecv (In[5], line 9), 3.0 s",
        "device 98 %, cpu 180 %",
    ):
        expect(detail).to_contain_text(said)
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="Rank 1, late: details")).to_be_focused()
    expect(page.get_by_role("group", name="Details of rank 1")).to_contain_text("rank 1 · late")
    page.keyboard.press("Escape")
    expect(page.locator(".nbs-detail")).to_be_hidden()
    page.locator(".nbs-ranks tbody tr").first.locator(".nbs-c-device").click()
    expect(detail).to_be_visible()


def test_stacks_open_in_a_pane_of_the_view_that_asked(show: Callable[..., Page]) -> None:
    page = show(frame_of())
    answer = {"kind": "text", "of": "stacks", "title": "Stacks of all ranks", "text": "<b>rank 0</b>\n  In[5], line 3"}
    page.evaluate("message => window.tell(message)", answer)  # another view of the widget has asked
    pane = page.get_by_role("region", name="Stacks of all ranks")
    expect(pane).to_be_hidden()
    page.get_by_role("button", name="Stacks").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # impatience asks no second time
    assert page.evaluate("window.sent.slice(1)") == [{"kind": "stacks"}]
    expect(page.get_by_role("button", name="Taking stacks…")).to_be_visible()
    page.evaluate("message => window.tell(message)", answer)
    expect(pane).to_be_focused()
    assert pane.inner_text() == answer["text"]
    page.evaluate("frame => window.update(frame)", frame_of(state="stopped"))
    expect(pane).to_be_visible()  # what was asked for stays
    page.keyboard.press("Escape")
    expect(pane).to_be_hidden()
    expect(page.get_by_role("button", name="Stacks")).to_be_focused()


def test_verdict_with_its_evidence_and_places(show: Callable[..., Page]) -> None:
    verdict = Verdict(
        "deadlock", "ranks 0 and 1 wait for each other", (0, 1), lines=("In[5], line 4",), evidence=("both in send",)
    )
    page = show(frame_of(verdict=verdict))
    expect(page.locator(".nbs-word")).to_have_text("deadlock")
    expect(page.locator(".nbs-evidence li")).to_have_text(["both in send", "In[5], line 4"])
    expect(page.get_by_role("status")).to_have_text("deadlock: ranks 0 and 1 wait for each other")
    expect(page.locator(".nbs-ranks tbody tr").first).to_contain_text("◆")


def test_frames_of_512_ranks_are_handled_fast(show: Callable[..., Page]) -> None:
    frames = [frame_of(size=512, step=step, lines=[(step, f"line {i + step}") for i in range(80)]) for step in range(4)]
    page = show(frames[0])
    handled = page.evaluate(
        """async (frames) => {
            const handled = [];
            for (let i = 1; i <= 20; i += 1) {
                await new Promise((resolve) => setTimeout(resolve, 100));
                const begin = performance.now();
                window.update(frames[i % frames.length]);
                document.body.offsetHeight; // the layout that the frame has made necessary
                handled.push(performance.now() - begin);
            }
            return handled.sort((one, other) => one - other);
        }""",
        frames,
    )
    print(f"\na frame of 512 ranks in the page: median {handled[10]:.1f} ms, slowest {handled[-1]:.1f} ms")
    assert handled[10] < 40  # 8 on a quiet machine; a walk through all cells for each line would be far beyond


@pytest.mark.parametrize("body", ['data-jp-theme-light="true"', 'data-jp-theme-light="false"'])
def test_axe_finds_no_serious_fault(show: Callable[..., Page], body: str) -> None:
    verdict = Verdict("mismatch", "different collectives meet", (1,), lines=("In[5], line 4",), evidence=("said",))
    coloured = [(0, f"\x1b[{code}mcolour {code}\x1b[0m") for code in range(30, 38)]
    states = [
        frame_of(state="starting"),
        frame_of(late=True, lines=coloured),
        frame_of(verdict=verdict),
        frame_of(size=40, late=True),
        frame_of(state="failed", message="rank 1 raised ValueError: boom"),
        frame_of(state="finished"),
    ]
    page = show(states[1], body=f"{body} lang=en")
    page.get_by_role("button", name="Rank 0: details").click()
    page.get_by_role("button", name="Diagnose").click()
    page.evaluate("window.tell({kind: 'text', of: 'diagnose', title: 'Diagnosis', text: 'all well'})")
    for frame in states:
        page.evaluate("frame => window.update(frame)", frame)
        found = Axe().run(page, context=".nbs").response["violations"]
        grave = [fault for fault in found if fault["impact"] in ("serious", "critical")]
        said = [(fault["id"], [node["html"] for node in fault["nodes"]][:3]) for fault in grave]
        assert said == [], frame["verdict"]["kind"]


def test_dispose_leaves_nothing(show: Callable[..., Page]) -> None:
    page = show(frame_of())
    assert page.evaluate("window.timers") == 1
    page.evaluate("window.dispose()")
    assert page.evaluate("[window.timers, window.listeners(), document.getElementById('here').children.length]") == [
        0,
        0,
        0,
    ]
