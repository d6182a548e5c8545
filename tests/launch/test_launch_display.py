"""display() in ranks: in the launch's own cell, under the rank, between the lines around it. C18."""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

import pytest
from IPython.display import HTML
from real_kernel import IT_HUNG, RealKernel

from nbstate import notebook_launcher
from nbstate.launch.display import _plain
from nbstate.launch.output import Output, Rich

Message = tuple[str, dict[str, Any]]

RICH = """
from IPython.display import HTML, Image, clear_output, update_display
from IPython.display import display as show_it

class Table:
    def __repr__(self): return "a table"
    def _repr_html_(self): return "<table></table>"

def shows(turn):
    rank = int(os.environ["RANK"])
    if rank != turn:
        return None
    print("before")
    display(Table())
    print("between", file=sys.stderr)
    show_it(Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + bytes(40), format="png", width=7))
    handle = show_it(HTML("<i>first</i>"), display_id="mine")
    clear_output(wait=True)
    handle.update(HTML("<i>second</i>"))
    print("after")
    return get_ipython_of_the_rank()

def get_ipython_of_the_rank():
    from IPython import get_ipython
    return get_ipython()
"""


def messages_of(kernel: RealKernel, sent: str, last: str = "") -> list[Message]:
    """What a cell was sent: until it is done, or until ``last`` was printed."""
    found: list[Message] = []
    deadline = time.monotonic() + IT_HUNG
    while True:
        assert time.monotonic() < deadline, f"it hung; so far: {found}"
        try:
            message = kernel.client.get_iopub_msg(timeout=1.0)
        except queue.Empty:
            continue
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != sent:
            continue
        found.append((kind, content))
        if kind == "error":
            pytest.fail("\n".join(content["traceback"]))
        if last and kind == "stream" and last in content["text"]:
            return found
        if not last and kind == "status" and content["execution_state"] == "idle":
            return found


def outputs(messages: list[Message]) -> list[Message]:
    return [one for one in messages if one[0] in ("stream", "display_data", "update_display_data")]


def test_rich_objects_arrive_under_their_rank_in_order(kernel: RealKernel, start_method: str) -> None:
    kernel.good(RICH)
    sent = kernel.start(
        f"notebook_launcher(shows, (1,), num_processes=2, start_method={start_method!r}, dashboard=False)"
    )
    messages = messages_of(kernel, sent)
    shown = [
        (kind, content.get("text") or dict(sorted(content["data"].items()))) for kind, content in outputs(messages)
    ]
    heading = ("display_data", {"text/html": "<b>rank 1</b>", "text/plain": "rank 1"})
    before, table_heading, table, between, image_heading, image, first, second, after = shown
    assert before == ("stream", "[1] before\n")
    assert table_heading == image_heading == heading  # not again for what follows a display of the same rank
    assert table == ("display_data", {"text/html": "<table></table>", "text/plain": "a table"})
    assert between == ("stream", "[1] between\n")
    assert image[1]["image/png"].startswith("iVBORw0KGgo")
    assert first[1]["text/html"] == "<i>first</i>"
    assert second == ("update_display_data", {**first[1], "text/html": "<i>second</i>"})
    assert after == ("stream", "[1] after\n")
    contents = [content for kind, content in outputs(messages) if kind != "stream"]
    assert contents[3]["metadata"] == {"image/png": {"width": 7}}
    assert contents[4]["transient"] == contents[5]["transient"]
    assert contents[4]["transient"]["display_id"].endswith("-1-mine")
    results = [content["data"]["text/plain"] for kind, content in messages if kind == "execute_result"]
    assert results == ["[None, None]"]  # no shell in a rank, so that libraries do not take it for a notebook


def test_a_display_belongs_to_the_cell_of_its_launch(kernel: RealKernel) -> None:
    kernel.good(
        "def late(marker):\n"
        "    while not os.path.exists(marker): time.sleep(0.01)\n"
        "    display({'text/html': '<b>late</b>', 'text/plain': 'late'}, raw=True)\n"
        "    handle.update('changed by a rank')\n"
        "    print('the end')\n"
        "import tempfile\n"
        "directory = tempfile.TemporaryDirectory()\n"
        "handle = display('of the notebook', display_id='notebooks-own')\n"
    )
    sent = kernel.start(
        "marker = directory.name + '/marker'\n"
        "launch = notebook_launcher(late, (marker,), num_processes=1, start_method='fork', block=False, "
        "dashboard=False)\n"
    )
    messages_of(kernel, sent)
    later = kernel.start("open(marker, 'w').close(); time.sleep(0.2)")
    shown = outputs(messages_of(kernel, sent, last="the end"))
    assert [kind for kind, _ in shown] == ["display_data", "display_data", "update_display_data", "stream"]
    assert shown[1][1]["data"]["text/html"] == "<b>late</b>"
    # a handle that the notebook made works in a forked rank
    assert shown[2][1]["transient"]["display_id"] == "notebooks-own"
    kernel.client.get_shell_msg(timeout=IT_HUNG)
    assert kernel.good("launch.results(); directory.cleanup(); launch.logs(0)").result == r"'late\nthe end\n'"
    assert later


def test_captured_displays_are_captured(kernel: RealKernel) -> None:
    kernel.good(RICH)
    reply = kernel.good(
        "from IPython.utils.capture import capture_output\n"
        "with capture_output() as captured:\n"
        "    notebook_launcher(shows, (0,), num_processes=1, start_method='forkserver', dashboard=False)\n"
        "captured.stdout, [sorted(output.data)[0] for output in captured.outputs][:3]"
    )
    assert reply.stdout == ""
    assert reply.result == r"('[0] before\n[0] after\n', ['text/html', 'text/html', 'text/html'])"


def display_everywhere() -> None:
    print("before")
    display(HTML("<b>x</b>"))  # type: ignore[name-defined]  # noqa: F821 - a builtin name, as in a notebook
    print("after")


def test_without_a_notebook_the_plain_text_is_printed(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(display_everywhere, num_processes=1, start_method=start_method)
    assert capsys.readouterr().out == "[0] before\n[0] <IPython.core.display.HTML object>\n[0] after\n"


def imported() -> bool:
    return "IPython" in sys.modules


def test_a_rank_that_displays_nothing_imports_no_ipython() -> None:
    assert notebook_launcher(imported, num_processes=1, start_method="forkserver") == [False]


def displays_until_interrupted() -> None:
    import threading

    from IPython.display import display

    def from_a_thread() -> None:
        for number in range(100):
            display({"text/plain": f"thread {number}"}, raw=True)

    other = threading.Thread(target=from_a_thread)
    other.start()
    number = 0
    try:
        while True:
            display({"text/plain": f"main {number} " + "x" * 300_000}, raw=True)
            number += 1
    finally:
        other.join()
        print("interrupted")


def test_an_interrupt_tears_no_display(capsys: pytest.CaptureFixture[str]) -> None:  # C13
    for _ in range(3):
        launch = notebook_launcher(displays_until_interrupted, num_processes=2, start_method="fork", block=False)
        deadline = time.monotonic() + IT_HUNG
        while "main 1" not in launch.logs(0) or "main 1" not in launch.logs(1):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launch.interrupt()
        with pytest.raises(KeyboardInterrupt):
            launch.results()
        lines = launch.logs(0).splitlines()
        assert [line for line in lines if line.startswith("thread")] == [f"thread {n}" for n in range(100)]
        main = [line for line in lines if line.startswith("main")]
        assert [line.split()[1] for line in main] == [str(number) for number in range(len(main))]
        assert {len(line.split()[2]) for line in main} == {300_000}
        assert lines[-1] == "interrupted"
    capsys.readouterr()


def displays_in_a_child() -> int:
    import os

    from IPython.display import display

    child = os.fork()
    if child == 0:
        display("of a child")
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_of_a_rank_prints_what_it_displays(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook_launcher(displays_in_a_child, num_processes=1, start_method="forkserver") == [0]
    assert capsys.readouterr().out == "[0] 'of a child'\n"


def displays_what_cannot_be_sent() -> str:
    from IPython.display import display, update_display

    with pytest.raises(TypeError, match="display_id"):
        display("x", update=True)
    with pytest.raises(TypeError, match="dict"):
        display("not a bundle", raw=True)
    update_display("y", display_id="never displayed")
    return "fine"


def test_wrong_use_is_told_to_the_user_and_ends_nothing() -> None:
    assert notebook_launcher(displays_what_cannot_be_sent, num_processes=1, start_method="forkserver") == ["fine"]


def says_goodbye() -> None:
    import atexit

    from IPython.display import display

    atexit.register(display, "goodbye")


def test_a_display_after_the_last_word_arrives_and_nobody_waits(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    notebook_launcher(says_goodbye, num_processes=2, start_method="forkserver")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 'goodbye'", "[1] 'goodbye'"]
    assert time.monotonic() - began < IT_HUNG


def test_displays_and_lines_keep_their_order() -> None:
    output = Output(2, "${rank}:")
    content: dict[str, object] = {"data": {"text/plain": "a\nb"}, "metadata": {}, "transient": {}}
    output.feed(0, "stdout", b"before\n")
    output.show(0, content, update=False)
    output.show(0, content, update=False)
    output.show(1, content, update=True)
    output.show(1, content, update=False)
    output.feed(0, "stdout", b"after\n")
    before, *rich, after = iter(output.take, None)
    assert (before, after) == (("stdout", "0:before\n"), ("stdout", "0:after\n"))
    assert [(one.rank, one.heading, one.update) for one in rich if isinstance(one, Rich)] == [
        (0, True, False),
        (0, False, False),
        (1, False, True),
        (1, True, False),
    ]
    assert isinstance(rich[0], Rich)
    assert rich[0].text == "0:a\n0:b\n"
    assert output.logs(1) == "a\nb\n"


def test_what_json_has_no_word_for() -> None:
    import numpy as np

    assert _plain(b"\x00\x01") == "AAE="
    assert _plain(np.float32(0.5)) == 0.5
    assert _plain({1}) == "{1}"
