"""A client of deer-flow's kind: it makes, finds and ends sandboxes by the provisioner's API and uses
what is inside of them by their URL, as deer-flow's own does. It fails by an exception."""

import base64
import concurrent.futures
import json
import os
import subprocess
import sys
import time

import requests

base, sandboxer, data = sys.argv[1:4]  # data: the directory of users' files, "" if there is none
auth = {"X-API-Key": os.environ["PROVISIONER_API_KEY"]}
patience = 120


def api(method, path, status=200, headers=auth, **kw):
    r = requests.request(method, base + path, headers=headers, timeout=patience, **kw)
    assert r.status_code == status, f"{method} {path}: {r.status_code} {r.text}, want {status}"
    return r


def same(got, want, what):
    assert got == want, f"{what}: {got!r}, want {want!r}"


def create(sandbox_id, thread_id, user_id="alice", status=200, **more):
    body = {"sandbox_id": sandbox_id, "thread_id": thread_id, "user_id": user_id, "include_legacy_skills": False,
            "provision_lark_cli_runtime": False, "provision_lark_cli_broker": False, "required_mount_contract_version": 2, **more}
    r = api("POST", "/api/sandboxes", status, json=body)
    return r.json()


def is_alive(sandbox_id):
    r = requests.get(f"{base}/api/sandboxes/{sandbox_id}", headers=auth, timeout=patience)
    if r.status_code == 404:
        return False
    r.raise_for_status()
    return r.json().get("status") == "Running"


def wait_ready(url):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            if requests.get(f"{url}/v1/sandbox", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    raise AssertionError("the sandbox does not become ready")


class Box:
    """What is inside of a sandbox."""

    def __init__(self, url):
        self.url = url

    def post(self, call, /, status=200, **body):
        r = requests.post(self.url + call, json=body, headers={"X-Fern-Language": "Python"}, timeout=patience)
        assert r.status_code == status, f"{call} {body}: {r.status_code} {r.text}, want {status}"
        return r.json()

    def bash(self, command, **more):
        return self.post("/v1/bash/exec", command=command, hard_timeout=600.0, **more)["data"]

    def shell(self, command, **more):
        return self.post("/v1/shell/exec", command=command, no_change_timeout=600, **more)["data"]

    def download(self, path):
        r = requests.get(self.url + "/v1/file/download", params={"path": path}, stream=True, timeout=patience)
        assert r.status_code == 200, r.text
        return b"".join(r.iter_content(65536))


def cli(*args):
    return subprocess.run([sandboxer, *args], check=True, capture_output=True, text=True, timeout=patience).stdout


def provisioner():
    same(requests.get(base + "/health", timeout=patience).json(), {"status": "ok"}, "health")
    same(api("GET", "/api/sandboxes", 401, headers={}).text, "Unauthorized", "without a key")
    caps = api("GET", "/api/capabilities").json()
    same((caps["lark_cli_init_image"], caps["lark_cli_broker_image"], caps["mount_contract_version"]), (False, False, 2), "capabilities")
    same(is_alive("dc977b840cb8638e"), False, "what was never made is alive")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: create("dc977b840cb8638e", "thread-1"), range(4)))
    # Who asks early may be told that it is pending.
    got = [{**g, "status": "Running"} for g in got]
    for other in got:
        same(other, got[0], "one of four creates")
    a = got[0]
    same((a["sandbox_id"], a["user_id"], a["thread_id"], a["mount_contract_version"]), ("dc977b840cb8638e", "alice", "thread-1", 2), "create")
    wait_ready(a["sandbox_url"])
    same(is_alive(a["sandbox_id"]), True, "it is alive")
    listed = []
    end = time.monotonic() + patience
    while not listed and time.monotonic() < end:
        same(Box(a["sandbox_url"]).bash("echo used")["stdout"], "used\n", "a use")  # on a slow machine it is paused by now
        listed = [s["sandbox_url"] for s in api("GET", "/api/sandboxes").json()["sandboxes"]]
    same(listed, [a["sandbox_url"]], "the list")
    create("dc977b840cb8638e", "thread-1", user_id="bob", status=409)
    create("x", "thread-1", status=400, extra_mounts=[{"host_path": "/etc", "container_path": "/mnt/acp-workspace", "read_only": True}])
    return a


def commands(box):
    info = requests.get(box.url + "/v1/sandbox", timeout=patience).json()
    for k in ("os", "os_version", "arch", "user", "home_dir", "timezone", "occupied_ports"):
        assert k in info["detail"]["system"], f"sandbox has no {k}: {info}"
    d = box.bash("echo out; echo err >&2; echo $X; exit 43", env={"X": "value"})
    same((d["stdout"].strip(), d["stderr"].strip(), d["exit_code"], d["status"]), ("out\nvalue", "err", 43, "completed"), "bash/exec")
    same(box.bash("echo $X; cd /tmp; pwd")["stdout"].strip(), "/tmp", "the environment is of one command")
    d = box.shell("echo out; echo err >&2")
    same((d["output"].strip(), d["exit_code"], d["status"]), ("out\nerr", 0, "completed"), "shell/exec")
    same(box.shell("exit")["status"], "completed", "a bare exit")
    same(box.shell("cat")["output"], "", "the input is empty")
    sid = "5f0c7a3e-0000-4000-8000-000000000001"
    for _ in range(2):
        same(box.post("/v1/shell/sessions/create", id=sid)["data"]["session_id"], sid, "a session")
    same(box.shell("echo in it", id=sid)["session_id"], sid, "its command")
    r = requests.delete(f"{box.url}/v1/shell/sessions/{sid}", timeout=patience)
    assert r.status_code == 200, r.text
    box.post("/v1/shell/exec", status=404, command="true", id=sid)
    d = box.post("/v1/bash/exec", command="echo begun; sleep 1000", hard_timeout=0.5)["data"]
    same(d["status"], "timed_out", "a time limit")
    assert d["stdout"] in ("begun\n", ""), f"what it had printed by then: {d}"  # nothing yet on a slow machine
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        same(sorted(pool.map(lambda i: box.shell(f"echo {i}")["output"].strip(), range(8))), [str(i) for i in range(8)], "side by side")
    box.post("/v1/browser/info", status=501)


def files(box):
    w = "/mnt/user-data/workspace"
    box.post("/v1/file/write", file=f"{w}/new/dir/a.txt", content="one\ntwo\nthree\n")
    d = box.post("/v1/file/read", file=f"{w}/new/dir/a.txt")["data"]
    same((d["file"], d["content"].rstrip("\n")), (f"{w}/new/dir/a.txt", "one\ntwo\nthree"), "read")
    same(box.post("/v1/file/read", file=f"{w}/new/dir/a.txt", start_line=1, end_line=2)["data"]["content"].strip(), "two", "some lines")
    binary = bytes(range(256)) * 4096
    box.post("/v1/file/write", file="/mnt/user-data/uploads/b.bin", content=base64.b64encode(binary).decode(), encoding="base64")
    same(box.download("/mnt/user-data/uploads/b.bin") == binary, True, "a file comes back as it was")
    same(box.post("/v1/file/find", path=w, glob="**/*.txt")["data"]["files"], [f"{w}/new/dir/a.txt"], "find")
    listed = box.post("/v1/file/list", path=w, recursive=True, show_hidden=False)["data"]["files"]
    same(sorted((f["path"], f["is_directory"]) for f in listed), [(f"{w}/new", True), (f"{w}/new/dir", True), (f"{w}/new/dir/a.txt", False)], "list")
    m = box.post("/v1/file/grep", path=w, pattern="TW.", case_insensitive=True, fixed_strings=False, max_results=10, max_file_size="1M", recursive=True)["data"]
    same([(x["file"], x["line_number"], x["line_content"]) for x in m["matches"]], [(f"{w}/new/dir/a.txt", 2, "two")], "grep")
    box.post("/v1/file/read", status=404, file=f"{w}/none")
    same(box.bash(f"touch /mnt/user-data/outputs/o && find {w} -name a.txt | head -1")["stdout"].strip(), f"{w}/new/dir/a.txt", "by a command")


def shared(a):
    here = os.path.join(data, "users/alice/threads/thread-1/user-data")
    with open(f"{here}/workspace/new/dir/a.txt") as f:
        same(f.read(), "one\ntwo\nthree\n", "the file on this machine")
    assert os.path.exists(f"{here}/outputs/o"), "what a command wrote is not there"
    with open(f"{here}/uploads/from-outside", "w") as f:
        f.write("uploaded")
    same(Box(a["sandbox_url"]).bash("cat /mnt/user-data/uploads/from-outside")["stdout"], "uploaded", "an upload")


def pause_and_resume(a):
    box = Box(a["sandbox_url"])
    sandbox_id = a["sandbox_id"]
    box.bash("echo kept > /root/kept; echo kept > /mnt/user-data/workspace/kept")
    if not data:  # by itself, since nobody uses it
        end = time.monotonic() + patience
        while time.monotonic() < end and json.loads(cli("get", sandbox_id, "-o", "json"))["state"] != "paused":
            same(is_alive(sandbox_id), True, "looking at it is no use of it, and it is alive")
            time.sleep(0.1)
    else:
        cli("pause", sandbox_id)
    same(json.loads(cli("get", sandbox_id, "-o", "json"))["state"], "paused", "its state")
    same(is_alive(sandbox_id), True, "a paused one is alive")
    same(api("GET", "/api/sandboxes").json()["count"], 0, "running ones")
    same(box.bash("cat /root/kept /mnt/user-data/workspace/kept")["stdout"], "kept\nkept\n", "after it was paused")
    same({**create(sandbox_id, a["thread_id"]), "status": "Running"}, a, "its URL stays")


def end(a):
    same(api("GET", f"/api/reconciliation/sandboxes/{a['sandbox_id']}").json()["status"], "found", "reconciliation")
    for _ in range(2):
        same(api("DELETE", f"/api/sandboxes/{a['sandbox_id']}").json()["ok"], True, "delete")
    same(is_alive(a["sandbox_id"]), False, "it is dead")
    same(api("GET", f"/api/reconciliation/sandboxes/{a['sandbox_id']}").json()["status"], "absent", "reconciliation")
    same(requests.post(a["sandbox_url"] + "/v1/bash/exec", json={"command": "true"}, timeout=patience).status_code, 410, "its URL")
    again = create(a["sandbox_id"], a["thread_id"])
    assert again["sandbox_url"] != a["sandbox_url"], "the next sandbox has its URL"
    wait_ready(again["sandbox_url"])
    has = "kept\n" if data else ""
    same(Box(again["sandbox_url"]).bash("cat /mnt/user-data/workspace/kept 2>/dev/null; true")["stdout"], has, "what the next one finds")
    api("DELETE", f"/api/sandboxes/{a['sandbox_id']}")


a = provisioner()
box = Box(a["sandbox_url"])
commands(box)
files(box)
if data:
    shared(a)
pause_and_resume(a)
end(a)
print("done")
