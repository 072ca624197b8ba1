"""The page's files: how they are served, and that they ask for nothing from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest

from minivllm.serve import command, operate, page

FILES = sorted(path.name for path in page.FOLDER.iterdir())
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def test_the_page_is_at_the_root(fake):
    reply = httpx.get(fake.url)
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.content == (page.FOLDER / "index.html").read_bytes()
    assert httpx.head(fake.url).status_code == 200
    assert httpx.post(fake.url).status_code == 405


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_type_and_its_guards(fake, name):
    reply = httpx.get(f"{fake.url}/page/{name}")
    assert reply.content == (page.FOLDER / name).read_bytes()
    assert reply.headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"


def test_a_browser_asks_again_and_is_told_that_nothing_has_changed(fake):
    first = httpx.get(f"{fake.url}/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    for tag in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = httpx.get(f"{fake.url}/page/app.js", headers={"if-none-match": tag})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == first.headers["etag"]
    assert httpx.get(f"{fake.url}/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/__init__.py", "../__init__.py"])
def test_nothing_else_is_served(fake, name):
    assert httpx.get(f"{fake.url}/page/{name}").status_code == 404


def test_it_needs_no_key_and_can_be_switched_off(fake_engine, serving):
    with serving(fake_engine, api_keys=["k"]) as url:
        assert httpx.get(url).status_code == httpx.get(f"{url}/page/app.js").status_code == 200
    with serving(fake_engine, with_page=False) as url:
        assert httpx.get(url).status_code == httpx.get(f"{url}/page/app.js").status_code == 404


def test_the_option_says_so():
    for given, wanted in (([], True), (["--page"], True), (["--no-page"], False)):
        assert operate.app_options(command.parser("serve").parse_args(given))["with_page"] is wanted


def test_the_files_name_each_other_and_nothing_from_elsewhere():
    texts = {name: (page.FOLDER / name).read_text() for name in FILES}
    named = set(re.findall(r'(?:page/|from "\./|import "\./)([\w.-]+)"', "\n".join(texts.values())))
    assert named | {"index.html"} == set(FILES), "a file is missing, or nobody loads it"
    for name, text in texts.items():
        elsewhere = set(re.findall(r"\w+://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, f"{name} names {elsewhere}"
    html = texts["index.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", html), "a script or a style in the HTML"
