"""What a person sees of a launch: a model without UI, a widget that draws it, and its picture as html and text."""

from __future__ import annotations

from nbstate.dashboard.model import Frame, LaunchFacts, LaunchView, Utilisation, build_frame
from nbstate.dashboard.picture import frame_to_html
from nbstate.dashboard.snapshot import frame_to_text
from nbstate.dashboard.terminal import TerminalDashboard, terminal_available
from nbstate.dashboard.widget import Controls, LiveDashboard, dashboard_available

__all__ = [
    "Controls",
    "Frame",
    "LaunchFacts",
    "LaunchView",
    "LiveDashboard",
    "TerminalDashboard",
    "Utilisation",
    "build_frame",
    "dashboard_available",
    "frame_to_html",
    "frame_to_text",
    "terminal_available",
]
