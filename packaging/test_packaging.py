#!/usr/bin/env python3
"""Tests of the install script and the formula, against made-up archives on a server of this machine, of the wheel's description, of
the files of services, and of the container's health check.

usage: python3 packaging/test_packaging.py
"""
import configparser, hashlib, http.server, io, os, pathlib, platform, plistlib, re, shutil, signal, subprocess, sys, tarfile, tempfile, threading, unittest

HERE = pathlib.Path(__file__).resolve().parent
VERSION = "9.8.7"
DEADLINE = 60  # seconds that one run of a script may take
TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"]


def native():
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return f"{machine}-apple-darwin" if sys.platform == "darwin" else f"{machine}-unknown-linux-gnu"


def archive(target, script, name="paguro"):
    """A tar.gz with one executable file."""
    memory, data = io.BytesIO(), script.encode()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"paguro-{VERSION}-{target}/{name}")
        info.size, info.mode = len(data), 0o755
        tar.addfile(info, io.BytesIO(data))
    return memory.getvalue()


class Release(http.server.BaseHTTPRequestHandler):
    """Serves `files`. Breaks off the transfer of a name in `interrupted` after half of it; waits there for a name in `stalled`."""

    files, interrupted, stalled = {}, set(), set()
    is_stalled, go_on = threading.Event(), threading.Event()

    def do_GET(self):
        name = self.path.lstrip("/")
        data = self.files.get(name)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if data is not None:
            self.wfile.write(data[: len(data) // 2] if name in self.interrupted | self.stalled else data)
        if name in self.stalled:
            self.is_stalled.set()
            self.go_on.wait(DEADLINE)
        self.close_connection = True

    def log_message(self, *_):
        pass


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.bin = self.root / "bin"
        self.name = f"paguro-{VERSION}-{native()}.tar.gz"
        Release.interrupted, Release.stalled = set(), set()
        script = f"#!/bin/sh\necho 'paguro {VERSION}'\n"
        Release.files = {f"paguro-{VERSION}-{target}.tar.gz": archive(target, script) for target in {*TARGETS, native()}}
        self.sum()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Release)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

    def sum(self):
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(Release.files.items())]
        Release.files["SHA256SUMS"] = "".join(lines).encode()

    def run_script(self, text=None, **environment):
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), "TMPDIR": str(temporary), "PAGURO_DOWNLOAD_URL": self.url,
                       "PAGURO_INSTALL_DIR": str(self.bin), "no_proxy": "127.0.0.1", **environment}
        text = (HERE / "install.sh").read_text() if text is None else text
        result = subprocess.run(["sh"], input=text, env=environment, capture_output=True, text=True, timeout=DEADLINE)
        self.assertEqual(list(temporary.iterdir()), [], "the script leaves files in its temporary folder")
        return result

    def refuses(self, message, **environment):
        """The script fails with this message, and the binary from before stays the only file in the folder."""
        self.bin.mkdir(exist_ok=True)
        (self.bin / "paguro").write_text("the one from before")
        result = self.run_script(**environment)
        self.assertNotEqual(result.returncode, 0, result.stderr)
        self.assertIn(message, result.stderr)
        self.assertEqual([path.name for path in self.bin.iterdir()], ["paguro"])
        self.assertEqual((self.bin / "paguro").read_text(), "the one from before")

    def test_a_release_is_installed(self):
        result = self.run_script()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"installed paguro {VERSION}", result.stderr)
        self.assertIn("is not in PATH", result.stderr)
        self.assertEqual([path.name for path in self.bin.iterdir()], ["paguro"])
        output = subprocess.run([self.bin / "paguro"], capture_output=True, text=True, timeout=DEADLINE).stdout
        self.assertEqual(output, f"paguro {VERSION}\n")

    def test_an_older_binary_is_replaced(self):
        self.bin.mkdir()
        (self.bin / "paguro").write_text("the one from before")
        result = self.run_script(PATH=f"{self.bin}:{os.environ['PATH']}")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("is not in PATH", result.stderr)
        self.assertIn(VERSION, (self.bin / "paguro").read_text())

    @unittest.skipUnless(shutil.which("wget"), "this machine has no wget")
    def test_wget_does_without_curl(self):
        tools = self.root / "tools"
        tools.mkdir()
        for tool in "sh uname grep head cut tar gzip mktemp rm mkdir cp mv chmod cat sha256sum shasum wget ldd sed".split():
            if path := shutil.which(tool):
                (tools / tool).symlink_to(path)
        result = self.run_script(PATH=str(tools))
        self.assertEqual(result.returncode, 0, result.stderr)
        Release.interrupted = {self.name}
        self.refuses("is incomplete", PATH=str(tools))

    def test_a_wrong_checksum_is_refused(self):
        Release.files[self.name] = archive(native(), "#!/bin/sh\necho 'not from the release'\n")
        self.refuses("nothing was installed")

    def test_an_interrupted_download_is_refused(self):
        Release.interrupted = {self.name}
        self.refuses("is incomplete")

    def test_ctrl_c_during_a_download_leaves_nothing_behind(self):
        Release.stalled = {self.name}
        Release.is_stalled.clear()
        Release.go_on.clear()
        self.addCleanup(Release.go_on.set)
        environment = {**os.environ, "TMPDIR": str(self.root), "PAGURO_DOWNLOAD_URL": self.url, "PAGURO_INSTALL_DIR": str(self.bin)}
        # A shell cannot trap a signal that was ignored when it began, as Ctrl-C is in background jobs of scripts.
        process = subprocess.Popen(["sh", HERE / "install.sh"], env=environment, start_new_session=True, stderr=subprocess.DEVNULL,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.assertTrue(Release.is_stalled.wait(DEADLINE))
        os.killpg(process.pid, signal.SIGINT)
        self.assertNotEqual(process.wait(DEADLINE), 0)
        self.assertEqual(list(self.root.iterdir()), [])

    def test_an_interrupted_list_of_checksums_is_refused(self):
        Release.interrupted = {"SHA256SUMS"}
        self.refuses("cannot download")

    def test_a_release_that_does_not_exist_is_refused(self):
        Release.files = {}
        self.refuses("is there such a release?")

    def test_a_missing_archive_is_refused(self):
        del Release.files[self.name]
        self.refuses("is incomplete")
        self.sum()
        self.refuses(f"no archive for {native()}")

    def test_an_archive_without_the_binary_is_refused(self):
        Release.files[self.name] = archive(native(), "", name="README.md")
        self.sum()
        self.refuses("has no binary")

    def test_a_damaged_archive_with_its_checksum_is_refused(self):
        Release.files[self.name] = b"not an archive"
        self.sum()
        self.refuses("cannot be unpacked")

    def test_a_binary_that_does_not_run_is_refused(self):
        Release.files[self.name] = archive(native(), "#!/bin/sh\nexit 1\n")
        self.sum()
        self.refuses("does not run on this system")

    def test_names_in_the_list_of_checksums_cannot_leave_the_folder(self):
        data = Release.files[self.name]
        line = f"{hashlib.sha256(data).hexdigest()}  ../../{self.name}\n"
        Release.files["SHA256SUMS"] = line.encode()
        self.refuses("no archive for")

    def test_half_of_the_script_does_nothing(self):
        text = (HERE / "install.sh").read_text()
        for part in range(1, 20):
            self.run_script(text=text[: len(text) * part // 20])
            self.assertFalse(self.bin.exists(), f"{part} of 20 parts")


class Formula(unittest.TestCase):
    def write(self, targets):
        with tempfile.TemporaryDirectory() as folder:
            sums = pathlib.Path(folder) / "SHA256SUMS"
            sums.write_text("".join(f"{index:064x}  paguro-{VERSION}-{target}.tar.gz\n" for index, target in enumerate(targets)))
            command = [HERE / "formula.sh", VERSION, sums]
            return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)

    def test_each_archive_has_its_checksum(self):
        result = self.write(TARGETS)
        self.assertEqual(result.returncode, 0, result.stderr)
        found = re.findall(r'url ".*/paguro-[0-9.]+-(.*)\.tar\.gz"\n\s*sha256 "(\w+)"', result.stdout)
        self.assertEqual(dict(found), {target: f"{index:064x}" for index, target in enumerate(TARGETS)})
        if ruby := shutil.which("ruby"):
            subprocess.run([ruby, "-c", "-"], input=result.stdout, text=True, check=True, timeout=DEADLINE, stdout=subprocess.DEVNULL)

    def test_a_missing_archive_is_an_error(self):
        result = self.write(TARGETS[:2])
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(TARGETS[2], result.stderr)


class Wheel(unittest.TestCase):
    def test_the_description_has_absolute_links(self):
        """PyPI shows the description without the files beside it."""
        readme = re.search(r'^readme = "(.*?)"', (HERE.parent / "pyproject.toml").read_text(), re.M).group(1)
        links = re.findall(r"\]\((.*?)\)", (HERE.parent / readme).read_text())
        self.assertTrue(links)
        self.assertEqual([link for link in links if not link.startswith("https://")], [])


class Service(unittest.TestCase):
    def test_units_start_the_server_and_agree_with_their_page(self):
        page = (HERE.parent / "docs/service.md").read_text()
        for unit in ["paguro.service", "paguro-user.service"]:
            parser = configparser.ConfigParser(strict=False, delimiters="=", comment_prefixes="#", interpolation=None)
            parser.optionxform = str
            parser.read(HERE / "service" / unit)
            self.assertRegex(parser["Service"]["ExecStart"], r"/bin/paguro serve$")
            self.assertIn("WantedBy", parser["Install"])
            self.assertIn(unit, page)
            # As on a machine where all of it is installed.
            if verify := shutil.which("systemd-analyze"):
                with tempfile.TemporaryDirectory() as folder:
                    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/sh", (HERE / "service" / unit).read_text(), flags=re.M)
                    (pathlib.Path(folder) / unit).write_text(text)
                    result = subprocess.run([verify, "verify", "--man=no", pathlib.Path(folder) / unit], capture_output=True, text=True, timeout=DEADLINE)
                    self.assertNotIn(unit, result.stderr)

    def test_the_agent_starts_the_server_and_agrees_with_its_page(self):
        agent = plistlib.loads((HERE / "service/io.github.paguro.plist").read_bytes())
        self.assertTrue(agent["ProgramArguments"][-1].endswith(" serve"))
        self.assertIn(f"{agent['Label']}.plist", (HERE.parent / "docs/service.md").read_text())

    def test_the_health_check_asks_the_server(self):
        status = 200

        class Health(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path == "/health" else 404)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)

        def is_healthy(port):
            environment = {**os.environ, "PAGURO_PORT": str(port)}
            return subprocess.run([HERE / "healthy.sh"], env=environment, stderr=subprocess.DEVNULL, timeout=DEADLINE).returncode == 0

        self.assertTrue(is_healthy(server.server_address[1]))
        status = 503
        self.assertFalse(is_healthy(server.server_address[1]))
        self.assertFalse(is_healthy(1))


if __name__ == "__main__":
    unittest.main()
