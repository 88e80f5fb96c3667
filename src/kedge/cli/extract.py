"""``kedge extract``: the features of a whole data set, into a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kedge.cli.factory import named
from kedge.errors import ScriptError

if TYPE_CHECKING:
    from kedge.recipes.dataset.options import Options
    from kedge.recipes.dataset.reading import FeatureSet

BATCH_SIZE = 64
_SHOWN = 5


class Extract:
    """Write the features of a whole data set into a folder.

    MODULE:NAME is a model, or a function that makes one; --data names a data set, a DataLoader, or a
    function that makes one. The model is put into evaluation mode. What is in the folder already is not
    computed again, so a run that was killed goes on when it is started again. Under torchrun each process
    takes its part.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        parser.add_argument(
            "model", metavar="MODULE:NAME", help="the model, or what makes it, such as torchvision.models:resnet18"
        )
        parser.add_argument(
            "--data", metavar="MODULE:NAME", required=True, help="the data set or DataLoader, or what makes it"
        )
        parser.add_argument(
            "--sites", metavar="SELECTOR", nargs="+", required=True, help="what to take, such as layer4 avgpool"
        )
        parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write, or to go on with")
        parser.add_argument("--rename", metavar="SITE=NAME", nargs="+", default=[], help="what to call a site's values")
        parser.add_argument(
            "--transform",
            metavar="[SITE=]HOW",
            nargs="+",
            default=[],
            help="what values go through first: mean, max (over positions), tokens, first, last, flatten, or MODULE:FUNCTION",
        )
        parser.add_argument(
            "--reduce",
            metavar="NAME=HOW",
            nargs="+",
            default=[],
            help="sum a site up instead: mean, covariance, histogram, quantiles, topk, or MODULE:NAME of a reducer",
        )
        parser.add_argument(
            "--format", choices=["safetensors", "zarr", "parquet"], default="safetensors", help="of the shards"
        )
        parser.add_argument("--batch-size", metavar="N", type=int, help=f"samples a batch (default: {BATCH_SIZE})")
        parser.add_argument("--workers", metavar="N", type=int, help="processes that load samples (default: 0)")
        parser.add_argument("--device", metavar="DEVICE", help="where to compute, such as cuda")
        parser.add_argument(
            "--dtype", metavar="DTYPE", help="what to keep values as, such as float16 (default: as they are)"
        )
        parser.add_argument(
            "--on-bad", choices=["raise", "skip"], default="raise", help="what happens with a sample that fails"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the folder, and say what is in it."""
        from kedge.recipes.dataset import extract_dataset
        from kedge.recipes.dataset.ranks import Rank
        from kedge.recipes.features import extract

        model = _model(args)
        sites = _transforms(args.sites, args.transform)
        rename = dict(_pair(text, "--rename") for text in args.rename)
        features = extract(model, sites, rename=rename, dtype=_dtype(args.dtype))
        found = extract_dataset(features, _loader(args), args.out, _options(args))
        if Rank.here().rank == 0:
            _tell(found)
        return 0


def _options(args: argparse.Namespace) -> Options:
    from kedge.recipes.dataset.options import Options

    reduce = {name: _reducer(how) for name, how in (_pair(text, "--reduce") for text in args.reduce)}
    return Options(format=args.format, on_bad=args.on_bad, device=args.device, reduce=reduce)


def _model(args: argparse.Namespace) -> Any:
    from torch import nn

    model = _made(args.model, nn.Module)
    if not isinstance(model, nn.Module):
        raise ScriptError(f"{args.model} gave {_a(model)}, not a model; name a module or a function that returns one")
    return model.eval() if args.device is None else model.eval().to(args.device)


def _loader(args: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader, Dataset

    data = _made(args.data, (Dataset, DataLoader))
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=args.batch_size or BATCH_SIZE, num_workers=args.workers or 0)
    given = [
        word for word, value in (("--batch-size", args.batch_size), ("--workers", args.workers)) if value is not None
    ]
    if given:
        raise ScriptError(
            f"{args.data} gave {_a(data)}, which has its own way of loading; leave {' and '.join(given)} out"
        )
    if not hasattr(data, "__iter__"):
        raise ScriptError(f"{args.data} gave {_a(data)}; name a data set, a DataLoader, or a function that returns one")
    return data


def _made(text: str, kinds: Any) -> Any:
    """Give what a name stands for, or what it makes when it is called."""
    found = named(text)
    return found() if callable(found) and not isinstance(found, kinds) else found


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _transforms(sites: Sequence[str], texts: Sequence[str]) -> dict[str, Callable[[Any], Any] | None]:
    """Give each site what its values go through; a transform without a site is all sites'."""
    from kedge.recipes.dataset.pooling import POOLINGS

    found: dict[str, Callable[[Any], Any] | None] = dict.fromkeys(sites)
    for text in texts:
        site, _, how = text.rpartition("=")
        if site and site not in found:
            raise ScriptError(f"--transform {text}: {site} is not among the sites {' '.join(sites)}")
        transform = POOLINGS.get(how) or _function(how, "--transform", POOLINGS)
        found |= dict.fromkeys([site] if site else sites, transform)
    return found


def _function(text: str, option: str, known: Mapping[str, Any]) -> Any:
    if ":" not in text:
        raise ScriptError(f"{option} {text}: there is {', '.join(known)}, or MODULE:NAME of your own")
    return named(text)


def _reducer(how: str) -> Any:
    from kedge.recipes import reduce

    known = {name.lower(): getattr(reduce, name) for name in ("Mean", "Covariance", "Histogram", "Quantiles", "TopK")}
    found = known.get(how) or _function(how, "--reduce", known)
    return found() if callable(found) else found


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ScriptError(f"{option} {text}: it is to be NAME={'VALUE' if option == '--reduce' else 'NEW'}")
    return name, value


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ScriptError(f"--dtype {name}: PyTorch has no such type; take float32, float16 or bfloat16, say")
    return found


def _tell(found: FeatureSet) -> None:
    print(found)
    bad = list(found.bad.items())
    for key, why in bad[:_SHOWN]:
        print(f"left out: {key}: {why}", file=sys.stderr)
    if len(bad) > _SHOWN:
        print(f"left out: {len(bad) - _SHOWN} more", file=sys.stderr)
