import sys, subprocess, re, pathlib, time, soak
class D(soak.Soak):
    n=0
    def phase(self, s):
        r = super().phase(s)
        p = self.process.pid; self.n+=1
        pathlib.Path(f"/tmp/smaps.{self.n}").write_text(pathlib.Path(f"/proc/{p}/smaps").read_text())
        out=subprocess.run(["gdb","-p",str(p),"-batch","-ex","call (void)malloc_stats()"],capture_output=True,text=True)
        print("stats", file=sys.stderr,flush=True)
        if r[0]>26e6:
            for m in (1,2):
                subprocess.run(["gdb","-p",str(p),"-batch","-ex",f"call (int)malloc_trim(0)"],capture_output=True,text=True)
            time.sleep(30)
            print("later", self.resident(), flush=True)
            pathlib.Path(f"/tmp/smaps.{self.n}.later").write_text(pathlib.Path(f"/proc/{p}/smaps").read_text())
        return r
soak.Soak=D
soak.main()
