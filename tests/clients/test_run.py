"""What `make clients` shows is what it recorded, and it runs every file that there is."""

from __future__ import annotations

import json

from clients.run import CLIENTS, PAGE, RECORD, SUITES, outcomes, table

REPORT = """<testsuites><testsuite>
<testcase name="test_a"><properties><property name="capability" value="abort"/></properties></testcase>
<testcase name="test_b"><properties><property name="capability" value="abort"/></properties>
  <skipped type="pytest.xfail" message="why"/></testcase>
<testcase name="stream: a rule of Node's"><failure message="it broke"/></testcase>
<testcase name="test_c"><skipped message="no package"/></testcase>
</testsuite></testsuites>"""


def test_every_file_of_a_client_is_run():
    pythons = {f"test_{client.name}.py" for client in CLIENTS if not client.is_nodes}
    nodes = {f"{client.name}.test.mjs" for client in CLIENTS if client.is_nodes}
    assert pythons == {path.name for path in SUITES.glob("test_*.py")}
    assert nodes == {path.name for path in (SUITES / "node").glob("*.test.mjs")}


def test_a_report_says_what_came_of_each_capability(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert outcomes(tmp_path / "report.xml") == {
        "abort": ["", "known: why"],
        "stream": ["FAILED: it broke"],
        "call": ["not run: no package"],
    }


def test_the_page_shows_the_record():
    record = json.loads(RECORD.read_text())
    assert f"Run on {record['date']}.\n\n{table(record['results'])}\n" in PAGE.read_text()
    assert {each["client"] for each in record["results"]} == {client.title for client in CLIENTS}
