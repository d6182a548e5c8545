"""The widget: what goes over its comm, and when. The last tests drive it in a real kernel."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import comm
import pytest
from comm.base_comm import BaseComm
from real_kernel import wait_until

from nbstate.dashboard import LiveDashboard, dashboard_available
from nbstate.errors import LaunchError
from nbstate.telemetry.board import Phase

Make = Callable[[int], Any]


class FakeComm(BaseComm):
    """Stands in for a kernel's comm: keeps what is published, and has the hook of ipykernel 7.4."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.published: list[tuple[str, dict[str, Any], list[Any]]] = []
        super().__init__(*args, **kwargs)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        self.published.append((msg_type, data or {}, buffers or []))

    def _reply_subshell_for(self, data: Any, default: Any) -> str:
        return "the busy shell"

    def click(self, content: Any) -> None:
        """Let a message come in from the page."""
        self.handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


class Clicks:
    """Controls that count."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: list[str] = []
        self.think = threading.Event()
        self.think.set()

    def interrupt(self) -> None:
        self.seen.append("interrupt")

    def stop(self) -> None:
        self.seen.append("stop")

    def stacks(self) -> str:
        self._note("stacks")
        return "rank 0 is here"

    def diagnose(self) -> str:
        self._note("diagnose")
        raise RuntimeError("no ranks")

    def _note(self, kind: str) -> None:
        assert self.think.wait(10)
        self.seen.append(kind)
        self.threads.append(threading.current_thread().name)


class Scene:
    """A dashboard over a fake comm, a stage to change, and a clock to turn."""

    def __init__(self, board: Any) -> None:
        self.board = board
        self.clicks = Clicks()
        self.time = 100.0
        self.dashboard = LiveDashboard(board.facts, self.clicks, clock=lambda: self.time)
        self.comm: FakeComm = self.dashboard.widget.comm

    def refresh(self, after: float = 1.0, **changes: Any) -> bool:
        self.time += after
        return self.dashboard.refresh(self.board.view(**changes))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [data for kind, data, _ in self.comm.published if kind == "comm_msg"]

    @property
    def frame(self) -> dict[str, Any]:
        """The last frame as the page would read it from its message."""
        sent = [buffers[0] for kind, _, buffers in self.comm.published if kind == "comm_msg" and buffers]
        return dict(json.loads(bytes(sent[-1])))


@pytest.fixture
def scene(stage: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(comm, "create_comm", FakeComm)
    made = Scene(stage(2).running())
    yield made
    made.dashboard.widget.close()


def test_a_refresh_is_one_message(scene: Scene) -> None:
    assert scene.refresh() is True
    assert [message["method"] for message in scene.messages] == ["update"]
    assert scene.messages[0]["buffer_paths"] == [["frame"]]
    assert scene.frame["ranks"]["step"] == [120, 120]
    assert scene.frame["now"] == 41.0


def test_nothing_is_sent_when_nothing_changed(scene: Scene) -> None:
    scene.refresh()
    scene.board.now += 10_000_000_000
    assert [scene.refresh() for _ in range(5)] == [False] * 5
    assert len(scene.messages) == 1


def test_at_most_ten_a_second(scene: Scene) -> None:
    sent = 0
    for step in range(1000):  # two seconds of a caller that is in a hurry
        scene.board.rank(0, step=step)
        sent += scene.refresh(after=0.002)
    assert sent == len(scene.messages)
    assert 15 <= sent <= 20


def test_the_last_frame_is_sent_however_soon(scene: Scene) -> None:
    scene.refresh()
    scene.board.rank(0, step=999)
    assert scene.refresh(after=0.001) is False
    scene.dashboard.finish(scene.board.view(state="finished"))
    assert (scene.frame["ranks"]["step"][0], scene.frame["state"]) == (999, "finished")


def test_nothing_is_sent_after_the_last_frame(scene: Scene) -> None:
    scene.dashboard.finish(scene.board.view(state="failed", message="rank 1 died"))
    scene.board.rank(0, step=999)
    assert scene.refresh() is False
    scene.dashboard.finish(scene.board.view(state="finished"))
    assert scene.frame["verdict"]["sentence"] == "rank 1 died"
    assert len(scene.messages) == 1


@pytest.mark.parametrize("kind", ["interrupt", "stop"])
def test_clicks_reach_the_controls(scene: Scene, kind: str) -> None:
    scene.comm.click({"kind": kind})
    assert scene.clicks.seen == [kind]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("stacks", ("Stacks of all ranks", "rank 0 is here")), ("diagnose", ("Diagnosis", "RuntimeError: no ranks"))],
)
def test_questions_are_answered_by_a_thread_of_their_own(scene: Scene, kind: str, answer: tuple[str, str]) -> None:
    scene.comm.click({"kind": kind})
    wait_until(lambda: bool(scene.messages), "an answer")
    assert scene.messages[-1]["content"] == {"kind": "text", "of": kind, "title": answer[0], "text": answer[1]}
    assert scene.clicks.seen == [kind]
    assert scene.clicks.threads == [f"nbstate-{kind}"]


def test_a_question_is_not_asked_twice_at_a_time(scene: Scene) -> None:
    scene.clicks.think.clear()
    for _ in range(3):
        scene.comm.click({"kind": "stacks"})
    scene.clicks.think.set()
    wait_until(lambda: bool(scene.messages), "an answer")
    assert scene.clicks.seen == ["stacks"]
    scene.comm.click({"kind": "stacks"})
    wait_until(lambda: len(scene.messages) == 2, "a second answer")


def test_an_answer_that_comes_after_the_end_is_dropped(scene: Scene) -> None:
    scene.clicks.think.clear()
    scene.comm.click({"kind": "stacks"})
    (thread,) = [each for each in threading.enumerate() if each.name == "nbstate-stacks"]
    scene.dashboard.finish(scene.board.view(state="finished"))
    scene.clicks.think.set()
    thread.join(10)
    assert [message["method"] for message in scene.messages] == ["update"]


@pytest.mark.parametrize("content", [None, "stop", {}, {"kind": "explode"}, {"kind": ["stop"]}])
def test_other_messages_are_ignored(scene: Scene, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    scene.comm.click(content)
    assert scene.clicks.seen == []
    assert caplog.records == []


def test_clicks_after_the_end_do_nothing(scene: Scene) -> None:
    scene.dashboard.finish(scene.board.view(state="finished"))
    scene.comm.click({"kind": "stop"})
    assert scene.clicks.seen == []


def test_a_view_that_says_hello_is_told_the_time_while_it_runs(scene: Scene) -> None:
    scene.refresh()
    scene.comm.click({"kind": "hello"})
    answer = scene.messages[-1]["content"]
    assert answer["kind"] == "clock"
    assert answer["now"] > 0
    scene.dashboard.finish(scene.board.view(state="finished"))
    before = len(scene.messages)
    scene.comm.click({"kind": "hello"})
    assert len(scene.messages) == before


def test_clicks_go_where_the_front_end_sent_them(scene: Scene) -> None:
    assert scene.comm._reply_subshell_for({"content": {}}, "subshell-1") == "subshell-1"


def test_mimebundle_has_view_picture_and_a_constant_line(scene: Scene) -> None:
    scene.refresh()
    bundle = scene.dashboard._repr_mimebundle_()
    assert bundle["text/plain"] == "nbstate dashboard"
    assert "training, step 120" in bundle["text/html"]
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == scene.dashboard.widget.model_id


def test_a_widget_that_someone_placed_elsewhere_stays_with_its_last_frame(scene: Scene) -> None:
    scene.dashboard.finish(scene.board.view(state="finished"))
    assert scene.frame["state"] == "finished"
    assert "comm_close" not in [kind for kind, _, _ in scene.comm.published]
    assert "application/vnd.jupyter.widget-view+json" in scene.dashboard._repr_mimebundle_()


def test_a_closed_widget_is_shown_as_its_picture(scene: Scene) -> None:
    scene.dashboard.finish(scene.board.view(state="finished"))
    scene.dashboard.widget.close()
    scene.dashboard.widget.close()
    assert [kind for kind, _, _ in scene.comm.published].count("comm_close") == 1
    for shown in (scene.dashboard, scene.dashboard.widget):
        bundle = shown._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "text/html"}
        assert "Finished in 41.0 s" in bundle["text/html"]


def test_before_the_first_refresh_every_rank_is_there(scene: Scene) -> None:
    first = json.loads(scene.dashboard.widget.frame)
    assert (first["state"], first["ranks"]["phase"]) == ("starting", ["absent", "absent"])


def test_a_forked_child_may_not_touch_it(scene: Scene) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing was refused"
        try:
            for touch in (scene.refresh, scene.dashboard.show, lambda: setattr(scene.dashboard.widget, "frame", b"x")):
                try:
                    touch()
                    break
                except LaunchError as error:
                    said = str(error).encode()
            else:
                scene.dashboard.widget.close()  # as its end of life does: says nothing to the kernel's page
                os.write(writer, said if scene.comm.published[-1][0] == "comm_open" else b"it was sent")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    assert f"belongs to the kernel (process {os.getpid()})" in said


def test_not_available_outside_a_kernel() -> None:
    assert dashboard_available() is False


LAUNCH = """
import threading, time
from nbstate.dashboard import LaunchFacts, LaunchView, LiveDashboard, dashboard_available
from nbstate.telemetry.board import Board, Phase
now = time.monotonic_ns
stopped = threading.Event()
class Controls:
    def interrupt(self): print("never")
    def stop(self): stopped.set()
    def stacks(self): return ""
    def diagnose(self): return ""
board = Board.create(2)
def view(state="running"):
    return LaunchView(board.snapshot(), now(), state, lines=[(0, "<i>hello</i>")])
dashboard = LiveDashboard(LaunchFacts("train", "In[1]", "fork", "local", 2, now()), Controls())
print(dashboard_available())
"""
BUSY = """
dashboard.show()
done = threading.Event()
def publish():
    step = 0
    while not done.wait(0.02):
        step += 1
        board.slot(0).write(phase=Phase.RUNNING, phase_since=now(), step=step)
        dashboard.refresh(view())
publisher = threading.Thread(target=publish)
publisher.start()
pressed = stopped.wait(30)
done.set()
publisher.join()
dashboard.finish(view("stopped"))
print("pressed", pressed)
"""


def messages_until_idle(client: Any, sent: str) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=30)
        yield message
        if (
            message["msg_type"] == "status"
            and message["content"]["execution_state"] == "idle"
            and message["parent_header"].get("msg_id") == sent
        ):
            return


def test_in_a_real_kernel_refreshes_and_clicks_pass_while_the_cell_is_busy(kernel: Any) -> None:
    client = kernel.client
    opened = None
    sent = kernel.start(LAUNCH)
    for message in messages_until_idle(client, sent):
        if message["msg_type"] == "comm_open":
            opened = message["content"]
        elif message["msg_type"] == "stream":
            assert message["content"]["text"] == "True\n"
    assert opened is not None
    assert opened["target_name"] == "jupyter.widget"

    # As JupyterLab does: messages of a comm go to a subshell of their own, when the kernel has them.
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    subshell = client.get_control_msg(timeout=30)["content"].get("subshell_id")
    updates, displays, final, out, kinds = 0, [], b"", "", []
    sent = kernel.start(BUSY)
    for message in messages_until_idle(client, sent):
        kind, content = message["msg_type"], message["content"]
        kinds.append(kind)
        if kind == "comm_msg" and content["data"]["method"] == "update":
            updates += 1
            final = bytes(message["buffers"][0])
            if updates == 4:
                click = {"method": "custom", "content": {"kind": "stop"}}
                press = client.session.msg("comm_msg", {"comm_id": opened["comm_id"], "data": click})
                press["header"]["subshell_id"] = subshell
                client.shell_channel.send(press)
        elif kind in ("display_data", "update_display_data"):
            displays.append((kind, content["data"]))
        elif kind == "stream":
            out += content["text"]

    assert out == "pressed True\n"
    frame = json.loads(final)
    assert (frame["state"], frame["actions"]) == ("stopped", [])
    assert [kind for kind, _ in displays] == ["display_data", "update_display_data"]
    assert {data["text/plain"] for _, data in displays} == {"nbstate dashboard"}
    assert "application/vnd.jupyter.widget-view+json" in displays[0][1]
    assert set(displays[-1][1]) == {"text/plain", "text/html"}
    assert "Stopped after" in displays[-1][1]["text/html"]
    # The last frame, then the picture in its place, and only then is the widget closed, and its layout.
    assert [kind for kind in kinds if kind not in ("status", "stream")][-4:] == [
        "comm_msg",
        "update_display_data",
        "comm_close",
        "comm_close",
    ]
    assert Phase.RUNNING.name.lower() == frame["ranks"]["phase"][0]
