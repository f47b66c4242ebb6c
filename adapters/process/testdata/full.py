"""An extension class with all that a class can have."""

import contextlib
import os
import pwd
import grp
import shutil
import signal
import socket
import stat
import subprocess
import sys
import uuid

import world
from sandboxer import errors, request
from sandboxer.extensions.base import SandboxExtension

KERNELS = ("/proc", "/sys")


@contextlib.contextmanager
def told(name):
    """Tell callers what is wrong with a file."""
    try:
        yield
    except FileNotFoundError as e:
        raise errors.NotFound(f"{name} is not there") from e
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as e:
        raise errors.Invalid(f"{name}: {e.strerror}") from e
    except PermissionError as e:
        raise errors.Denied(f"{name}: {e.strerror}") from e


class Full(SandboxExtension):
    """Directories and processes of this machine.

    They have its users, its network and its files to read, and write in their own directory.
    """

    accepts = ["env", "ports", "user"]
    isolation_levels = ["process"]

    # Where things are.

    def place(self, kind, name):
        return os.path.join(self.config["root"], request.current().owner, kind, name)

    def box(self, handle):
        return self.place("boxes", handle["sandbox_id"])

    def at(self, handle):
        """Return the sandbox's directory, and what it is."""
        where = self.box(handle)
        try:
            return where, world.read(where)
        except FileNotFoundError:
            raise errors.NotFound(f"sandbox {handle['sandbox_id']} is not there") from None

    def path(self, handle, name, *, write=False, last=True):
        """Return a name if it may be used. last: also if it is a link."""
        where, _ = self.at(handle)
        real = os.path.realpath(name if last else os.path.dirname(name))
        if any(real == k or real.startswith(k + "/") for k in KERNELS) or not last and name in KERNELS:
            raise errors.Denied(f"{name} is the kernel's")
        if write and not (real + "/").startswith(os.path.join(os.path.realpath(where), "work") + "/"):
            raise errors.Denied(f"{name} is not the sandbox's")
        return name

    def own(self, handle, *names):
        """Give files to the sandbox's user."""
        user = self.at(handle)[1]["user"]
        if user:
            entry = pwd.getpwnam(user)
            for name in names:
                os.lchown(name, entry.pw_uid, entry.pw_gid)

    # The three verbs.

    def make(self, inputs, host, source=None):
        call = request.current()
        handle = {"sandbox_id": inputs["sandbox_id"], "host": host, "generation": str(call.generation)}
        where = self.box(handle)
        new = where + ".gone"  # which is what it is until it is whole
        os.makedirs(new)
        if source:
            subprocess.run(["cp", "-a", "--", source, os.path.join(new, "work")], check=True)
        else:
            os.mkdir(os.path.join(new, "work"))
        user = call.spec.get("user") or ""
        if user and not source:
            entry = pwd.getpwnam(user)
            os.chown(os.path.join(new, "work"), entry.pw_uid, entry.pw_gid)
        until = call.fuse.timestamp() if call.fuse else float("inf")
        world.write(new, {"handle": handle, "env": dict(call.env), "user": user, "until": until, "paused": False})
        os.rename(new, where)
        subprocess.run([sys.executable, "-I", "-S", world.__file__, "keep", where], check=True, start_new_session=True)
        return handle

    def provision(self, profile, inputs, host):
        return self.make(inputs, host)

    def wait_ready(self, handle):
        where, _ = self.at(handle)
        return {"remote_dir": os.path.join(where, "work"), "host": handle["host"]}

    def teardown(self, handle):
        where = self.box(handle)
        return {"removed": where} if world.remove(where) else {}

    # Commands.

    def exec(self, handle, command):
        where, sandbox = self.at(handle)
        if command.service:
            raise errors.Unsupported("a directory has no services")
        if sandbox["paused"]:
            raise errors.Conflict(f"sandbox {handle['sandbox_id']} is paused")
        work = os.path.join(where, "work")
        env = {"PATH": os.environ["PATH"], "HOME": work, **sandbox["env"], **command.env}
        return command.run(world.inside(where, command.args), env=env, cwd=command.dir or work, user=command.user or sandbox["user"])

    # Files.

    def read_file(self, handle, path):
        with told(path):
            if stat.S_ISDIR(os.stat(self.path(handle, path)).st_mode):
                raise errors.Invalid(f"{path} is a directory")
            return open(path, "rb")

    def write_file(self, handle, path, source, mode):
        self.make_dir(handle, os.path.dirname(path))
        with told(path):
            new = os.path.join(os.path.dirname(path), ".new-" + uuid.uuid4().hex)
            try:
                with open(new, "xb") as f:
                    shutil.copyfileobj(source, f)
                os.chmod(new, mode)
                if os.path.exists(path):  # it keeps its owner and its other names
                    shutil.copyfile(new, path)
                    os.chmod(path, mode)
                else:
                    self.own(handle, new)
                    os.replace(new, os.path.realpath(path))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new)

    def info(self, path):
        s = os.lstat(path)
        out = {"path": path, "size": s.st_size, "mode": s.st_mode, "mod_time": s.st_mtime}
        with contextlib.suppress(KeyError):
            out["owner"], out["group"] = pwd.getpwuid(s.st_uid).pw_name, grp.getgrgid(s.st_gid).gr_name
        if stat.S_ISLNK(s.st_mode):
            out["target"] = os.readlink(path)
        return out

    def stat_file(self, handle, path):
        with told(path):
            return self.info(self.path(handle, path, last=False))

    def list_files(self, handle, dir):
        with told(dir), os.scandir(self.path(handle, dir)) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    yield self.info(os.path.join(dir, entry.name))

    def make_dir(self, handle, dir):
        with told(dir):
            missing, at = [], self.path(handle, dir, write=True)
            while not os.path.lexists(at):
                missing.append(at)
                at = os.path.dirname(at)
            os.makedirs(dir, exist_ok=True)
            self.own(handle, *missing)

    def move_file(self, handle, from_, to):
        for name in (from_, to):
            self.path(handle, name, write=True, last=False)
        with told(from_):
            os.rename(from_, to)

    def remove_file(self, handle, path):
        with told(path):
            self.path(handle, path, write=True, last=False)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    # Archives.

    def archive(self, handle, dir, out):
        dir = self.path(handle, dir) if dir else os.path.join(self.at(handle)[0], "work")
        with told(dir):
            os.stat(dir + "/.")
        with subprocess.Popen(["tar", "-C", dir, "-c", "."], stdout=subprocess.PIPE) as tar:
            try:
                shutil.copyfileobj(tar.stdout, out)
            except BaseException:
                tar.kill()
                raise
        if tar.returncode != 0:
            raise errors.Failed(f"{dir} cannot be read whole")

    def unarchive(self, handle, dir, source):
        where, sandbox = self.at(handle)
        work = os.path.join(where, "work")
        dir = dir or work
        self.make_dir(handle, dir)
        new = os.path.join(where, "new-" + uuid.uuid4().hex)
        os.mkdir(new)
        try:
            with subprocess.Popen(["tar", "-C", new, "-x", "--no-same-owner", "-p"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
                try:
                    with contextlib.suppress(BrokenPipeError):
                        shutil.copyfileobj(source, tar.stdin)
                        tar.stdin.close()
                except BaseException:
                    tar.kill()
                    raise
            if tar.returncode != 0:
                raise errors.Invalid("it is no archive, or not a whole one")
            for at, dirs, files in os.walk(new):
                self.own(handle, at, *(os.path.join(at, n) for n in dirs + files))
            for entry in os.scandir(dir):
                self.remove_file(handle, entry.path)
            for entry in os.scandir(new):
                os.rename(entry.path, os.path.join(dir, entry.name))
        finally:
            shutil.rmtree(new, ignore_errors=True)

    # Ports.

    def dial(self, handle, port):
        where, _ = self.at(handle)
        sockets = {}
        for file, address in (("/proc/net/tcp", "127.0.0.1"), ("/proc/net/tcp6", "::1")):
            with contextlib.suppress(FileNotFoundError), open(file) as table:
                for line in list(table)[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                        sockets[f"socket:[{fields[9]}]"] = address
        for pid in world.members(where) if sockets else ():
            with contextlib.suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        address = sockets.get(os.readlink(f"/proc/{pid}/fd/{fd}"))
                        if address:
                            return socket.create_connection((address, port), timeout=5)
        raise errors.Unavailable(f"nothing listens on port {port} of sandbox {handle['sandbox_id']}")

    def expose(self, handle, port):
        self.at(handle)
        return f"http://127.0.0.1:{port}"

    # What is there.

    def is_alive(self, handle):
        self.at(handle)
        return True

    def list_running(self):
        boxes = self.place("boxes", "")
        for name in os.listdir(boxes) if os.path.isdir(boxes) else ():
            with contextlib.suppress(FileNotFoundError):
                if not name.endswith(".gone"):
                    yield world.read(os.path.join(boxes, name))["handle"]

    def notify(self):
        # From now on, and not from when the first one is asked for.
        known, canceled = self.there(), request.current().canceled

        def changes(known):
            while not canceled.wait(0.05):
                now = self.there()
                yield from known ^ now
                known = now

        return changes(known)

    def there(self):
        return {h["sandbox_id"] for h in self.list_running()}

    def discover(self, sandbox_id):
        try:
            return self.at({"sandbox_id": sandbox_id})[1]["handle"]
        except errors.NotFound:
            return None

    # Snapshots.

    def supports_snapshots(self):
        return True

    def snapshot(self, handle):
        where, _ = self.at(handle)
        saved = self.place("saved", request.current().snapshot_id)
        shutil.rmtree(saved, ignore_errors=True)
        os.makedirs(os.path.dirname(saved), exist_ok=True)
        subprocess.run(["cp", "-a", "--", os.path.join(where, "work"), saved], check=True)
        return {"snapshot_id": os.path.basename(saved)}

    def restore_from_snapshot(self, profile, snapshot_meta, inputs, host):
        return self.make(inputs, host, self.place("saved", snapshot_meta["snapshot_id"]))

    def drop_snapshot(self, snapshot_meta):
        shutil.rmtree(self.place("saved", snapshot_meta["snapshot_id"]), ignore_errors=True)

    # Money.

    def estimate_cost(self, profile, inputs, *, duration_s=3600):
        return 0.01 + 0.1 * duration_s / 3600

    def meter_actual(self, handle, *, duration_s):
        return 0.1 * duration_s / 3600

    # Life.

    def change(self, handle, **values):
        where, sandbox = self.at(handle)
        world.write(where, {**sandbox, **values})
        return where

    def pause(self, handle):
        world.each(self.change(handle, paused=True), signal.SIGSTOP)

    def resume(self, handle):
        world.each(self.change(handle, paused=False), signal.SIGCONT)

    def renew(self, handle, until):
        self.change(handle, until=until.timestamp())

    def capacity(self, host):
        if host not in ("", "localhost"):
            raise errors.Invalid(f"there is no host {host}")
        return {"free": 100, "hosts": ["localhost"]}

    def stats(self, handle):
        where, _ = self.at(handle)
        out = {"pids": 0, "memory_bytes": 0, "disk_bytes": 0}
        for pid in world.members(where):
            with contextlib.suppress(OSError):
                out["memory_bytes"] += int(world.status(pid).get("VmRSS", 0)) << 10
                out["pids"] += 1
        for at, _, files in os.walk(where):
            for name in files:
                with contextlib.suppress(OSError):
                    out["disk_bytes"] += os.lstat(os.path.join(at, name)).st_size
        return out

    def check(self, profile, inputs, host):
        user = request.current().spec.get("user")
        if user:
            try:
                pwd.getpwnam(user)
            except KeyError:
                raise errors.Invalid(f"there is no user {user}") from None

    def notices(self):
        return ["sandboxes of ext.test are not isolated from this machine"]
