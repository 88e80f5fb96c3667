"""Where NaN and infinities come from: every operation of PyTorch that can make one, made to make one.

For each operation small programs are written, and trained under `kedge.watch` at its defaults. Some
ways into a training are sound for 30 steps; then one row of one batch gives the operation numbers
of which it makes a NaN or an infinity, in its forward or only in its backward. The operation stands
in the forward of a module, in the loop beside the loss, or in a function that the loop calls. What
NAN-BORN says afterwards is right if it names the line of the operation for certain, and no other.

    python benchmarks/nan_origins.py [--only log sqrt] [--places module loop function] [--verbose]
"""

from __future__ import annotations

import argparse
import io
import runpy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch

import kedge
from kedge.rules import check
from kedge.store.recording import Recording

PLACES = ("module", "loop", "function")
BAD_STEP = 30


@dataclass(frozen=True)
class Case:
    """An operation, and numbers that it makes something non-finite of.

    Attributes:
        name: Its name here.
        call: The expression; `v` are numbers between 0.25 and 0.75, one row of which is bad.
        bad: The numbers of the bad row.
        backward: Whether its result is finite, and only its gradient is not.
    """

    name: str
    call: str
    bad: str
    backward: bool = False


FORWARD = (
    ("log", "torch.log(v)", "0.0"),
    ("log_negative", "v.log()", "-1.0"),
    ("log2", "torch.log2(v)", "0.0"),
    ("log10", "torch.log10(v)", "-1.0"),
    ("log1p", "torch.log1p(v)", "-1.0"),
    ("sqrt", "torch.sqrt(v)", "-1.0"),
    ("rsqrt", "torch.rsqrt(v)", "0.0"),
    ("reciprocal", "torch.reciprocal(v)", "0.0"),
    ("div", "1.0 / v", "0.0"),
    ("div_zero_by_zero", "v / v", "0.0"),
    ("fmod", "torch.fmod(v, v.detach())", "0.0"),
    ("remainder", "torch.remainder(v, v.detach())", "0.0"),
    ("pow_half", "v ** 0.5", "-1.0"),
    ("pow_negative", "v ** -2", "0.0"),
    ("pow_of_two", "torch.pow(2.0, v)", "1000.0"),
    ("pow_tensors", "torch.pow(v, v)", "-0.5"),
    ("exp", "torch.exp(v)", "1000.0"),
    ("exp2", "torch.exp2(v)", "1000.0"),
    ("expm1", "torch.expm1(v)", "1000.0"),
    ("sinh", "torch.sinh(v)", "1000.0"),
    ("cosh", "torch.cosh(v)", "1000.0"),
    ("acos", "torch.acos(v)", "2.0"),
    ("asin", "torch.asin(v)", "2.0"),
    ("acosh", "torch.acosh(v + 1)", "-1.0"),
    ("atanh", "torch.atanh(v)", "1.0"),
    ("erfinv", "torch.erfinv(v)", "1.0"),
    ("logit", "torch.logit(v)", "1.0"),
    ("lgamma", "torch.lgamma(v)", "0.0"),
    ("digamma", "torch.digamma(v)", "0.0"),
    ("entr", "torch.special.entr(v)", "-1.0"),
    ("ndtri", "torch.special.ndtri(v)", "0.0"),
    ("log_ndtr", "torch.special.log_ndtr(v)", "-1e30"),
    ("i0", "torch.special.i0(v)", "1000.0"),
    ("erfcx", "torch.special.erfcx(v)", "-1000.0"),
    ("xlogy", "torch.xlogy(v, v)", "-1.0"),
    ("xlog1py", "torch.special.xlog1py(v, -v)", "1.0"),
    ("square", "v.square()", "1e30"),
    ("mul", "v * v", "1e30"),
    ("add", "v + v", "3e38"),
    ("sub", "v - (-v)", "3e38"),
    ("sum", "v.sum(1)", "1e38"),
    ("prod", "v.prod(1)", "1e30"),
    ("cumsum", "v.cumsum(1)", "1e38"),
    ("cumprod", "v.cumprod(1)", "1e30"),
    ("matmul", "v @ v.T", "1e30"),
    ("bmm", "torch.bmm(v[None], v.T[None])[0]", "1e30"),
    ("einsum", "torch.einsum('ij,kj->ik', v, v)", "1e30"),
    ("linear", "F.linear(v, v)", "1e30"),
    ("addmm", "torch.addmm(v.new_zeros(len(v), len(v)), v, v.T)", "1e30"),
    ("conv1d", "F.conv1d(v[:, None], torch.full((1, 1, 3), 1e10))", "1e30"),
    ("addcdiv", "torch.addcdiv(v, v, v.detach())", "0.0"),
    ("addcmul", "torch.addcmul(v, v, v)", "1e30"),
    ("hypot", "torch.hypot(v, v)", "3e38"),
    ("norm", "v.norm(dim=1)", "1e30"),
    ("vector_norm", "torch.linalg.vector_norm(v, 3, dim=1)", "1e30"),
    ("normalize_no_eps", "F.normalize(v, dim=1, eps=0.0)", "0.0"),
    ("cosine_no_eps", "v[:, :4] / v[:, :4].norm(dim=1, keepdim=True)", "0.0"),
    ("std_of_one", "v[: 1 if bad.any() else 16].std(0)", "0.5"),
    ("half", "v.half().float()", "1e6"),
    ("softplus_inverse", "torch.log(torch.expm1(v))", "0.0"),
    ("logsumexp_exp", "v.exp().sum(1).log()", "1000.0"),
    ("softmax_by_hand", "v.exp() / v.exp().sum(1, keepdim=True)", "1000.0"),
    ("masked_softmax", "v.masked_fill(v == 0, -torch.inf).softmax(1)", "0.0"),
    ("masked_log_softmax", "v.masked_fill(v == 0, -torch.inf).log_softmax(1)", "0.0"),
    ("masked_mean", "(v * (v > 0)).sum(1) / (v > 0).sum(1)", "-1.0"),
    ("mean_of_none", "v[v[:, 0] > (9 if bad.any() else 0)].mean()", "0.5"),
    ("standardize", "(v - v.mean(1, keepdim=True)) / v.std(1, keepdim=True)", "0.5"),
    ("layer_norm_no_eps", "F.layer_norm(v, (8,), eps=0.0)", "0.5"),
    ("rms_norm_by_hand", "v * v.square().mean(1, keepdim=True).rsqrt()", "0.0"),
    ("poisson_nll", "F.poisson_nll_loss(v, v.detach().abs())", "1000.0"),
    ("kl_by_hand", "v.detach() * (v.detach().log() - v.log())", "0.0"),
    ("bce_by_hand", "-(v.log() + (1 - v).log())", "1.0"),
    ("gaussian_by_hand", "(v - 0.5) ** 2 / (2 * v ** 2) + v.log()", "0.0"),
    ("mse_overflow", "F.mse_loss(v, -v.detach())", "1e30"),
    ("logdet", "torch.logdet(v[:, :1, None] * torch.eye(2))", "0.0"),
    ("slogdet", "torch.linalg.slogdet(v[:, :1, None] * torch.eye(2))[1]", "0.0"),
    ("inv", "torch.linalg.inv_ex(v[:, :1, None] * torch.eye(2))[0]", "0.0"),
    ("where", "torch.where(v > 0, v, 1 / v)", "0.0"),
    ("clamp_late", "torch.log(v).clamp(min=-100) + 1 / v", "0.0"),
)
BACKWARD = (
    ("sqrt_backward", "torch.sqrt(v)", "0.0"),
    ("pow_half_backward", "v ** 0.5", "0.0"),
    ("norm_by_hand_backward", "v.square().sum(1).sqrt()", "0.0"),
    ("std_backward", "v.var(1).sqrt()", "0.5"),
    ("acos_backward", "torch.acos(v)", "1.0"),
    ("asin_backward", "torch.asin(v)", "1.0"),
    ("acosh_backward", "torch.acosh(v + 1)", "0.0"),
    ("where_sqrt_backward", "torch.where(v > 0, v.sqrt(), v)", "0.0"),
    ("where_log_backward", "torch.where(v > 0, v.log(), v.new_zeros(()))", "0.0"),
    ("where_div_backward", "torch.where(v > 0, 1 / v, v.new_zeros(()))", "0.0"),
    ("clamped_log_backward", "torch.log(v).clamp(min=-100)", "0.0"),
    ("hidden_div_backward", "torch.nan_to_num(1 / v, posinf=0.0)", "0.0"),
    ("hypot_backward", "torch.hypot(v, v)", "0.0"),
    ("distance_backward", "((v - 0.5) ** 2).sum(1).sqrt()", "0.5"),
    ("pow_base_backward", "torch.pow(v, 0.3)", "0.0"),
    ("prod_exp_backward", "1 / (1 + torch.exp(v))", "89.0"),
    ("exp_minimum_backward", "torch.exp(v).clamp(max=10.0)", "1000.0"),
    ("tanh_by_hand_backward", "1 - 2 / (torch.exp(2 * v) + 1)", "100.0"),
    ("sigmoid_by_hand_backward", "1 / (1 + torch.exp(-v))", "-100.0"),
    ("softplus_by_hand_backward", "torch.where(v > 20, v, torch.log1p(v.exp()))", "1000.0"),
    ("rsqrt_hidden_backward", "torch.where(v > 0, v.rsqrt(), v)", "0.0"),
)
CASES = (
    *(Case(*each) for each in FORWARD),
    *(Case(*each, backward=True) for each in BACKWARD),
)

PROGRAM = """\
import torch
from torch import nn
from torch.nn import functional as F


def spoil(v, bad, value):
    return torch.where(bad > 0, v * 0 + value, v)


class Part(nn.Module):
    def forward(self, h, bad):
        v = spoil(h.sigmoid() / 2 + 0.25, bad, {bad})
        {module}
        return r


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.part = Part()
        self.head = nn.Linear(8, 3)

    def forward(self, x, bad):
        h = torch.tanh(self.stem(x))
        return self.head(h), self.part(h, bad)


def penalty(v, bad):
    {function}
    return r


def train():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(40):
        x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        bad = torch.zeros(16, 1)
        if step == {step}:
            bad[5] = 1
        optimizer.zero_grad()
        logits, h = net(x, bad)
        v = h if {inside} else spoil(h.sigmoid() / 2 + 0.25, bad, {bad})
        {loop}
        loss = F.cross_entropy(logits, y) + 0.01 * r.float().mean()
        loss.backward()
        optimizer.step()
"""


def written(case: Case, place: str) -> str:
    """Return the program of a case; the operation stands in one place only."""
    at = {"module": "r = h", "function": "r = v", "loop": "r = v"}
    if place == "function":
        at["loop"] = "r = penalty(v, bad)"
    at[place] = f"r = {case.call}  # here"
    return PROGRAM.format(step=BAD_STEP, inside=place == "module", bad=case.bad, **at)


def judged(case: Case, place: str, folder: Path) -> tuple[str, str]:
    """Train a program under a watch; return what became of its fault, and what was said."""
    file = folder / f"{case.name}_{place}.py"
    file.write_text(written(case, place), encoding="utf-8")
    right = next(
        number
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if "# here" in line
    )
    train = runpy.run_path(str(file))["train"]
    recording = folder / f"{file.stem}.kedge"
    with redirect_stderr(io.StringIO()), kedge.watch(recording, force=True):
        train()
    found = [each for each in check(Recording.open(recording)) if each.code == "NAN-BORN"]
    if not found:
        return "nothing said", ""
    first = found[0]
    text = " ".join(first.message.split())
    told = f"[{first.severity}, step {first.step}] {text}"
    if first.step != BAD_STEP:
        return "another step", told
    if f"{file.name}:{right}" not in text:
        return "no line" if f"{file.name}:" not in text else "another line", told
    if any(word in text for word in ("probably", "so can ", "may have", "one of ")):
        return "as one of several", told
    return "right", told


def cases(only: list[str], places: list[str]) -> Iterator[tuple[Case, str]]:
    """Yield the cases that were asked for, in every place."""
    for case in CASES:
        if not only or case.name in only:
            for place in places:
                yield case, place


def main() -> None:
    """Run all cases, and print how many are named right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--places", nargs="*", default=list(PLACES), choices=PLACES)
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    counts: dict[tuple[str, bool], Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, place in cases(options.only, options.places):
            verdict, text = judged(case, place, Path(folder))
            counts.setdefault((place, case.backward), Counter())[verdict] += 1
            if verdict != "right" or options.verbose:
                print(f"{verdict:<18} {place:<9} {case.name:<24} {text[:300]}")
                sys.stdout.flush()

    print()
    total = Counter[str]()
    for (place, backward), counted in counts.items():
        total += counted
        made = "backward" if backward else "forward"
        parts = ", ".join(f"{number} {verdict}" for verdict, number in counted.most_common())
        print(f"{place:<9} {made:<9} {parts}")
    every = sum(total.values())
    print(f"right: {total['right']} of {every} ({total['right'] / every:.3f})")


if __name__ == "__main__":
    main()
