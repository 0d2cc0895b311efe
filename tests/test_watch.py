"""`folb watch` as a server: which requests get an answer, with what headers, and what is new after a cursor."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse

import pytest
import rundirectory

from folb.errors import InputError
from folb.report import live
from folb.store import directory


@pytest.fixture
def home(tmp_path):
    return tmp_path / "runs"  # FOLB_RUNS of the tests


@pytest.fixture
def served():
    """Start servers, and end them."""
    servers = []

    def start(name=None, port=0):
        server = live.bound(name, port)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def news(server, name, after="", records=""):
    query = urllib.parse.urlencode({"after": after, "records": records})
    response, content = ask(server, f"/data/{name}?{query}")
    assert response.status == 200
    return json.loads(content)


def test_every_answer_has_the_headers_that_keep_it_to_itself(home, served):
    rundirectory.write(home, "a-1", rounds=2)
    server = served()
    for path, status, kind in [
        ("/", 200, "text/html; charset=utf-8"),
        ("/run/a-1", 200, "text/html; charset=utf-8"),
        ("/data/a-1", 200, "application/json"),
        ("/nothing", 404, "text/plain; charset=utf-8"),
    ]:
        response, content = ask(server, path)
        assert (response.status, response.headers["Content-Type"]) == (status, kind) and content
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self'" in response.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Server"].strip() == "folb"
        head, nothing = ask(server, path, "HEAD")
        assert (head.status, nothing) == (status, b"") and head.headers["Content-Type"] == kind


def test_only_a_proper_host_is_answered(home, served):
    rundirectory.write(home, "a-1", rounds=2)
    server = served()
    port = server.server_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LocalHost:{port}", f"[::1]:{port}"):
        assert ask(server, "/run/a-1", Host=host)[0].status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "", f"0.0.0.0:{port}"):
        response, content = ask(server, "/data/a-1", Host=host)
        assert (response.status, content) == (403, b"403 Forbidden\n")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("GET", "/", skip_host=True)
    for host in (f"127.0.0.1:{port}", "evil.example"):
        connection.putheader("Host", host)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_it_listens_on_the_loopback_address_alone(served):
    assert served().server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_answered(method, home, served):
    rundirectory.write(home, "a-1", rounds=2)
    response, _ = ask(served(), "/run/a-1", method)
    assert response.status == 501 and "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/run/..",
        "/run/%2e%2e",
        "/data/../secret",
        "/data/..%2fsecret",
        "/data/%2e%2e%2fsecret",
        "/data/a-1/../../secret",
        "/data/a-1%00",
        "/data/",
        "/run",
        "//evil.example/run/a-1",
        "/data/%ff%fe",
        "http://evil.example/run/a-1",
    ],
)
def test_no_path_leads_out_of_the_runs(path, home, served):
    rundirectory.write(home, "a-1", rounds=2)
    rundirectory.write(home.parent, "secret", rounds=2)
    server = served()
    assert ask(server, path, Host=f"127.0.0.1:{server.server_port}")[0].status == 404


def test_home_lists_the_runs_or_leads_to_the_one_there_is(home, served):
    rundirectory.write(home, "a-1", rounds=2)
    broken = rundirectory.write(home, "b-2", rounds=2)
    (broken / "experiment.toml").write_text("not toml")
    _, content = ask(served(), "/")
    for name in ("a-1", "b-2", "cannot be read", "synthetic_1_1, logistic regression"):
        assert name.encode() in content
    response, content = ask(served(), "/list")
    assert response.headers["Content-Type"] == "application/json"
    assert {one["name"]: one["state"] for one in json.loads(content)} == {"a-1": "finished", "b-2": "cannot be read"}
    alone = served("a-1")
    assert ask(alone, "/list")[0].status == 404
    response, _ = ask(alone, "/")
    assert (response.status, response.headers["Location"]) == (302, "/run/a-1")
    assert ask(alone, "/run/b-2")[0].status == 404


def test_a_run_outside_the_home_by_its_path(tmp_path, served, monkeypatch):
    path = rundirectory.write(tmp_path / "elsewhere", "a-1", rounds=2)
    assert news(served(str(path)), "a-1")["about"]["name"] == "a-1"
    monkeypatch.chdir(path)
    assert news(served("."), "a-1")["about"]["name"] == "a-1"


def test_any_directory_name_is_only_a_name(home, served):
    for name in ("<script>alert(1)<∕script>", "a b?c#d%41", '"quoted"', "run-\udcff"):
        path = rundirectory.write(home, name, rounds=2)
        server = served()
        _, content = ask(server, "/")
        assert json.dumps(name).replace("<", r"\u003c").replace(">", r"\u003e").encode() in content
        quoted = urllib.parse.quote(os.fsencode(name), safe="")
        response, content = ask(server, f"/run/{quoted}")
        assert response.status == 200 and b"<script>alert" not in content
        assert news(server, quoted)["about"]["name"] == name
        shutil.rmtree(path)


def test_increments(home, served):
    path = rundirectory.write(home, "a-1", done=5, rounds=20, finished=False)
    server = served()
    first = news(server, "a-1", records="4")
    assert first["fresh"] and first["about"]["state"] == "interrupted"
    assert [column["rounds"] for column in first["columns"]] == [[1, 2, 3, 4, 5]] * 9
    assert ["records" in column for column in first["columns"]] == [i == 4 for i in range(9)]

    nothing = news(server, "a-1", first["cursor"])
    assert not nothing["fresh"] and nothing["cursor"] == first["cursor"]
    assert all(column["rounds"] == [] for column in nothing["columns"])

    rundirectory.append(path, 6, 7)
    with open(path / "rounds.jsonl", "a") as file:
        file.write('{"run": 0, "algorithm": "folb", "round": 8')  # torn
    second = news(server, "a-1", first["cursor"])
    assert not second["fresh"] and [column["rounds"] for column in second["columns"]] == [[6, 7]] * 9
    assert second["about"]["table"] != first["about"]["table"]
    # a page that comes later gets the same in one piece
    assert [column["rounds"] for column in news(server, "a-1")["columns"]] == [[1, 2, 3, 4, 5, 6, 7]] * 9
    whole = live.table(directory.read(path), directory.read(path).runs())
    assert second["about"]["table"] == whole == news(server, "a-1")["about"]["table"]


def test_the_epsilon_of_a_private_run_goes_on_with_its_rounds(home, served):
    path = rundirectory.write(home, "a-1", done=0, rounds=3, algorithms=("fedavg",), seeds=1, finished=False)
    server = served()
    assert "epsilon" not in news(server, "a-1")["about"]["table"]["headings"]
    for t in (1, 2):
        rundirectory.append(path, t, t, records=False)
        *lines, last = (path / "rounds.jsonl").read_text().splitlines()
        lines.append(json.dumps(json.loads(last) | {"epsilon": 1.5 * t}))
        (path / "rounds.jsonl").write_text("\n".join(lines) + "\n")
        table = news(server, "a-1")["about"]["table"]
        assert table["rows"][0][table["headings"].index("epsilon")] == f"{1.5 * t:g}"


def test_a_long_run_comes_in_pieces(home, served, monkeypatch):
    monkeypatch.setattr(live, "PIECE", 3000)
    path = rundirectory.write(home, "a-1", done=20, rounds=20)
    server, after, rounds, counts = served(), "", [[] for _ in range(9)], []
    while len(counts) < 200:
        piece = news(server, "a-1", after)
        after = piece["cursor"]
        counts.append(sum(len(column["rounds"]) for column in piece["columns"]))
        for own, column in zip(rounds, piece["columns"], strict=True):
            own += column["rounds"]
        if not piece["more"]:
            break
    assert rounds == [list(range(1, 21))] * 9
    assert len(counts) > 5 and max(counts) * len((path / "rounds.jsonl").read_bytes()) / 180 < 2 * 3000
    assert piece["about"]["table"] == live.table(directory.read(path), directory.read(path).runs())
    assert not news(server, "a-1", after)["more"]


def test_a_line_longer_than_a_piece(home, served, monkeypatch):
    monkeypatch.setattr(live, "PIECE", 10)
    rundirectory.write(home, "a-1", done=2, rounds=2)
    assert sum(len(column["rounds"]) for column in news(served(), "a-1")["columns"]) == 1


def test_a_line_that_is_not_finite_is_left_out(home, served):
    path = rundirectory.write(home, "a-1", done=2, rounds=2)
    whole = news(served(), "a-1", records="0")
    line = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    with open(path / "rounds.jsonl", "a") as file:
        for name, value in line.items():
            for odd in (float("nan"), float("inf")):
                file.write(json.dumps(line | {name: [odd] if isinstance(value, list) else odd}) + "\n")
    sent = news(served(), "a-1", records="0")
    assert sent["columns"][0]["judged"] == whole["columns"][0]["judged"]


def test_another_server_goes_on_from_the_same_cursor(home, served):
    path = rundirectory.write(home, "a-1", done=5, rounds=20, finished=False)
    cursor = news(served(), "a-1")["cursor"]
    rundirectory.append(path, 6, 6)
    after = news(served(), "a-1", cursor)
    assert not after["fresh"] and [column["rounds"] for column in after["columns"]] == [[6]] * 9
    assert after["about"]["table"] == live.table(directory.read(path), directory.read(path).runs())


@pytest.mark.parametrize("change", ["shorter", "other lines", "begun anew", "gone"])
def test_a_file_that_is_not_what_it_was_is_sent_from_its_beginning(change, home, served):
    path = rundirectory.write(home, "a-1", done=5, rounds=20, finished=False)
    server = served()
    cursor = news(server, "a-1")["cursor"]
    file = path / "rounds.jsonl"
    if change == "shorter":
        rows = file.read_text().splitlines(keepends=True)
        file.write_text("".join(row for row in rows if json.loads(row)["round"] <= 3))
    elif change == "other lines":
        file.write_text(file.read_text().replace('"seconds": 1', '"seconds": 2'))
    elif change == "begun anew":
        shutil.rmtree(path)
        rundirectory.write(home, "a-1", done=6, rounds=20, finished=False, started="2026-02-03T04:05:06+00:00")
    else:
        file.unlink()
    again = news(server, "a-1", cursor)
    rounds = {"shorter": [1, 2, 3], "other lines": [1, 2, 3, 4, 5], "begun anew": [1, 2, 3, 4, 5, 6], "gone": []}[
        change
    ]
    assert again["fresh"] and [column["rounds"] for column in again["columns"]] == [rounds] * 9
    assert again["about"]["table"] == live.table(directory.read(path), directory.read(path).runs())
    assert not news(server, "a-1", again["cursor"])["fresh"]


def test_a_file_cut_back_while_it_is_read_is_sent_again(home, monkeypatch):
    path = rundirectory.write(home, "a-1", done=5, rounds=20, finished=False)
    following, read = live.Following(path), directory.RunDirectory.rounds

    def cut(stored, offset=0, size=-1):
        content = read(stored, offset, size)
        rows = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
        (path / "rounds.jsonl").write_text("".join(row for row in rows if json.loads(row)["round"] <= 3))
        return content

    with monkeypatch.context() as patched:
        patched.setattr(directory.RunDirectory, "rounds", cut)
        cursor = following.news("", "")["cursor"]
    again = following.news(cursor, "")
    assert again["fresh"] and [column["rounds"] for column in again["columns"]] == [[1, 2, 3]] * 9
    assert again["about"]["table"] == live.table(directory.read(path), directory.read(path).runs())


@pytest.mark.parametrize(
    "cursor",
    ["0", "-1", "5-zz", "x", *(f"{offset}-0123456789abcdef" for offset in (7, 999_999, "9" * 13, "9" * 18, "9" * 20))],
)
def test_a_cursor_nobody_gave_is_the_beginning(cursor, home, served):
    rundirectory.write(home, "a-1", rounds=2)
    assert news(served(), "a-1", cursor, records="-1")["fresh"]


def test_a_run_that_is_removed_is_not_there(home, served):
    path = rundirectory.write(home, "a-1", rounds=2)
    server = served()
    cursor = news(server, "a-1")["cursor"]
    (path / "experiment.toml").unlink()
    assert ask(server, f"/data/a-1?after={cursor}")[0].status == 404
    shutil.rmtree(path)
    assert ask(server, f"/data/a-1?after={cursor}")[0].status == 404


def test_a_port_in_use_or_out_of_range(home, served):
    port = served().server_port
    for wrong in (port, 70000, -1):
        with pytest.raises(InputError, match=f"port = {wrong}: should be a free port, or 0 for any"):
            live.bound(None, wrong)
    with pytest.raises(InputError, match="there is no such run"):
        live.bound("none", 0)


def test_it_prints_its_address_and_ends_with_ctrl_c(home):
    code = "from folb.report import live; live.serve(port=0, announce=lambda line: print(line, flush=True))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:") and line.endswith("/ shows all runs; Ctrl-C ends it\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
