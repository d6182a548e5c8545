from __future__ import annotations

from html.parser import HTMLParser

from nbstate.state.html import render_card


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_names_and_values_in_order():
    reader = read(render_card("State", "one line", {"device": "cpu", "backend": None}))
    assert reader.texts == ["State", " ", "one line", "device", "cpu", "backend", "None"]
    assert [attrs["scope"] for tag, attrs in reader.tags if tag == "th"] == ["row", "row"]


def test_everything_is_escaped():
    nasty = '<script>alert("x")</script>&'
    page = render_card(nasty, nasty, {nasty: nasty})
    assert "<script" not in page
    assert read(page).texts.count(nasty) == 4


def test_it_is_self_contained_and_every_colour_has_a_fallback():
    page = render_card("State", "", {"a": 1})
    assert {tag for tag, _ in read(page).tags} == {"div", "strong", "span", "table", "tbody", "tr", "th", "td"}
    assert "http" not in page
    for variable in page.split("var(")[1:]:
        assert "," in variable.split(")")[0]


def test_without_rows_there_is_no_table():
    assert "<table" not in render_card("State", "not built", {})
