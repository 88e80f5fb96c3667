"""Programs that train and do what programs do to their process; each is run with Kedge and without."""

from __future__ import annotations

TRAIN = """
import os, sys, signal, threading, time
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((4,), float(i))

def train(steps=3, batches=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches if batches is not None else [torch.ones(2, 4)] * steps:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

def square(x):
    return x * x
"""

_LOADER = """
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers={workers}, multiprocessing_context="{how}")
    print([train(batches=loader) for _ in range({workers})])
"""

#: What a program does, and the source that follows `TRAIN`.
PROGRAMS = {
    **{f"data-loader workers by {how}": _LOADER.format(how=how, workers=workers) for how, workers in (("fork", 2), ("spawn", 1), ("forkserver", 1))},
    "workers that stay": """
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=True)
    print([train(batches=loader) for _ in range(2)])
""",
    "models in worker processes": """
import multiprocessing
def work(steps):
    torch.set_num_threads(1)
    return train(steps)
if __name__ == "__main__":
    print(train())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, [1, 2, 3]), pool.map(square, range(4)))
""",
    "training in a thread": """
told = []
thread = threading.Thread(target=lambda: told.append(train()))
thread.start(); thread.join()
print(told, train())
""",
    "training in two threads at once": """
told = [None, None]
def work(i): told[i] = train(20)
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(told[0] is not None and told[1] is not None)
""",
    # A daemon thread that is in PyTorch's own code at the end aborts the process, with Kedge and
    # without.
    "a daemon thread at the end": """
def forever():
    train(1)
    while True: time.sleep(0.01)
print(train())
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
""",
    "a thread that outlives the last line": """
train()
def late():
    time.sleep(0.2); print("late", train())
threading.Thread(target=late).start()
print("end")
""",
    "sys.exit in a thread": """
def leave(): train(); sys.exit(3)
thread = threading.Thread(target=leave); thread.start(); thread.join()
print("goes on", train())
""",
    "an error in a thread": """
threading.excepthook = lambda how: print("hook", how.exc_value)
def fail(): train(); raise ValueError("in a thread")
thread = threading.Thread(target=fail); thread.start(); thread.join()
""",
    "another folder": "os.mkdir('there'); os.chdir('there'); print(train()); print(os.listdir())",
    "a folder that is gone": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); print(train())",
    "closed stdout": "train(); sys.stdout.close(); train(); raise SystemExit(4)",
    "closed stderr": "train(); sys.stderr.close(); print(train()); raise SystemExit(4)",
    "closed descriptors": "train(); os.close(1); os.close(2); train(); os._exit(5)",
    "replaced streams": """
import io
sys.stdout = sys.stderr = io.StringIO()
print(train())
sys.__stdout__.write(sys.stdout.getvalue())
""",
    "none in place of streams": "sys.stdout = sys.stderr = None; print('lost'); train(); raise SystemExit(6)",
    "modes and a profiler": """
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))
class Called(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func.__name__)
        return func(*args, **(kwargs or {}))
torch.zeros(1)  # the server has imported PyTorch, so what is left alone shows with the first operation
for steps in (3, 30):
    with Dispatched(), Called(): train(steps)
    kept = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes lines with the time
    with torch.autograd.profiler.profile() as found: train(steps)
    os.dup2(kept, 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append('packed'), t)[1], lambda t: t): train(steps)
    print(len(seen), sorted(set(seen)), len(found.function_events))
""",
    "os._exit": "print(train(), flush=True); os._exit(7)",
    "os.execv": "print(train(), flush=True); os.execv(sys.executable, [sys.executable, '-c', 'print(\"another\"); exit(8)'])",
    "abort": "import faulthandler; faulthandler.disable(); print(train(), flush=True); os.abort()",
    "a handler of SIGTERM": """
def stop(number, frame):
    print("stopped by", number, train()); raise SystemExit(9)
signal.signal(signal.SIGTERM, stop)
train(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)
""",
    "SIGTERM without a handler": "print(train(), flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
    "an interrupt in training": """
class Stop(nn.Module):
    def forward(self, x): signal.raise_signal(signal.SIGINT); return x
train()
try:
    Stop()(torch.ones(2))
except KeyboardInterrupt:
    print("interrupted", train())
""",
    "an interrupt": "print(train()); signal.raise_signal(signal.SIGINT)",
    "atexit": """
import atexit
atexit.register(lambda: print("bye", train()))
print(train())
""",
    "an error in a forward": """
class Fail(nn.Module):
    def forward(self, x): raise ValueError("no")
print(train()); Fail()(torch.ones(1))
""",
    "an error in a backward": """
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ValueError("no gradient")
class Net(nn.Linear):
    def forward(self, x): return Bad.apply(super().forward(x))
try:
    Net(2, 2)(torch.ones(1, 2)).sum().backward()
except ValueError as error:
    print(error, train())
""",
    "itself as a subprocess": """
import subprocess
if len(sys.argv) == 1:
    print(train(), flush=True)
    print(subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True).stdout)
else:
    print("child", train())
""",
    "a bare fork that trains on": """
train()
pid = os.fork()
if pid:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), train())
else:
    print("child", train(), flush=True); sys.exit(5)
""",
    "a child that outlives its parent": """
print(train(), flush=True)
if os.fork() == 0:
    time.sleep(0.3); print("child", train(), flush=True); os._exit(0)
""",
    "a garbage-collected model": """
import gc, weakref
model = nn.Linear(2, 2); model(torch.ones(1, 2)).sum().backward()
gone = weakref.ref(model); del model; gc.collect()
print(gone() is None, train())
""",
    "scripted models": """
model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
print(model(torch.ones(1, 2)).shape, train())
live = nn.Sequential(nn.Linear(2, 2), nn.ReLU()); before = live(torch.ones(1, 2))
after = torch.jit.script(live)
print(torch.equal(after(torch.ones(1, 2)), before), live(torch.ones(1, 2)).shape, train())
""",
    "fake tensors": """
from torch._subclasses.fake_tensor import FakeTensorMode
model = nn.Linear(4, 4); model(torch.ones(1, 4))
with FakeTensorMode() as mode:
    dream = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for _ in range(3): out = dream(torch.ones(2, 4)); out.sum().backward()
    print(type(out).__name__, tuple(out.shape))
print(train())
""",
    "no memory of warnings": """
import warnings
warnings.simplefilter("error")
print(train())
""",
    "clocks of its own": """
print(train())
def broken(*args): raise RuntimeError("no clock")
time.perf_counter = time.monotonic = time.time = broken
print(train())
""",
    "functions replaced": """
import builtins, io, json
print(train())
json.dumps = json.loads = builtins.open = io.open = os.open = os.write = os.fstat = os.stat = os.getpid = None
builtins.print = lambda *args: sys.stdout.write("mine")
""",
    "no paths, and an error": "print(train()); os.fspath = None; raise ValueError('mine')",
    "all modules removed": "print(train()); sys.modules.clear()",
    "no more imports": "print(train()); sys.path = sys.path_hooks = None",
    "a small limit of recursion": "print(train()); sys.setrecursionlimit(40)",
    "an error that cannot be printed": """
class Mute(Exception):
    def __str__(self): raise SystemExit(9)
print(train()); raise Mute
""",
    "a trace function that raises at the end": """
def trace(*args): raise RuntimeError("trace")
print(train()); sys.settrace(trace)
""",
    "numbers of its own files": """
train()
files = [open(f"mine-{i}", "w") for i in range(3)]
print([file.fileno() for file in files], train())
""",
    "all descriptors closed": """
train()
os.closerange(3, 20_000)
files = [open(f"mine-{i}", "w") for i in range(5)]
train()
for file in files: file.write("mine"); file.close()
print([open(file.name).read() for file in files], train())
""",
    "few descriptors": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
print(train(), open("mine", "w").fileno())
""",
    "a mask of all rights": "os.umask(0o777); print(train()); os.umask(0o022)",
    "no gradients and no device at the end": """
print(train())
torch.set_default_device("meta"); torch.set_grad_enabled(False); torch.inference_mode(True).__enter__()
""",
    "a thread that trains while the program ends": """
def late():
    for _ in range(40): train(1)
print(train())
threading.Thread(target=late).start()
print("end")
""",
    "deep recursion": """
class Deep(nn.Module):
    def forward(self, x, n): return x if n == 0 else self(x + 1, n - 1)
print(train(), Deep()(torch.zeros(1), 60).item())
""",
}  # fmt: skip
