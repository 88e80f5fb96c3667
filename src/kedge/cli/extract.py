"""``kedge extract``: the features of a whole data set, into a folder."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.cli.factory import named
from kedge.cli.reducers import failed, function, pair, reducers
from kedge.errors import ScriptError

if TYPE_CHECKING:
    from kedge.features.dataset.folder.reading import FeatureSet
    from kedge.features.dataset.options import Options
    from kedge.features.dataset.ranks import Rank

#: How many samples the model is given at once.
BATCH_SIZE = 64
_SHOWN = 5


class Extract:
    """Write the features of a whole data set into a folder.

    MODULE:NAME is a model, or a function that makes one; --data names a data set, a DataLoader, or a
    function that makes one. The model is put into evaluation mode. What is in the folder already is not
    computed again, so a run that was killed goes on when it is started again. Under torchrun each process
    takes its part, and the first waits for the others and says what there is.
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
            "--dtype", metavar="DTYPE", help="what to keep values as, such as float16 (default: as they are)"
        )
        self._add_summing(parser)
        self._add_loading(parser)
        self._add_writing(parser)

    def _add_summing(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--reduce",
            metavar="NAME=HOW",
            nargs="+",
            default=[],
            help="sum a site up instead: mean, covariance, histogram, quantiles, topk, or MODULE:NAME of a reducer; "
            "arguments in parentheses, such as 'conv1=covariance(positions=mean)'; one name may have several",
        )
        parser.add_argument(
            "--keep", metavar="NAME", nargs="+", default=[], help="what to keep although it is summed up"
        )

    def _add_loading(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--batch-size", metavar="N", type=int, help=f"samples a batch (default: {BATCH_SIZE})")
        parser.add_argument("--workers", metavar="N", type=int, help="processes that load samples (default: 0)")
        parser.add_argument("--device", metavar="DEVICE", help="where to compute, such as cuda")
        parser.add_argument(
            "--batch",
            metavar="MODULE:FUNCTION",
            help="what makes the model's arguments of a batch: a tensor, a tuple or a dict (default: its first entry)",
        )
        parser.add_argument(
            "--keys",
            metavar="FILE",
            help="what samples are called: a file with a line for each, or MODULE:NAME of a list, or of a function "
            "that gives those of a batch (default: their index)",
        )
        parser.add_argument(
            "--version",
            metavar="TEXT",
            help="what your functions go by, in place of digests of them: the folder goes on as long as it is the same",
        )
        parser.add_argument(
            "--on-bad", choices=["raise", "skip"], default="raise", help="what happens with a sample that fails"
        )

    def _add_writing(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--format", choices=["safetensors", "zarr", "parquet"], default="safetensors", help="of the shards"
        )
        parser.add_argument(
            "--shard-bytes", metavar="N", type=int, help="write a shard when it has so many bytes (default: 64 MiB)"
        )
        parser.add_argument(
            "--shard-seconds", metavar="S", type=float, help="write a shard when it is so old (default: 60)"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the folder, and say what is in it."""
        from kedge.features.dataset import extract_dataset
        from kedge.features.dataset.ranks import Rank
        from kedge.features.extract import extract

        _must_be_at_least(args, {"batch_size": 1, "workers": 0, "shard_bytes": 1, "shard_seconds": 0})
        options = _options(args)
        model = _model(args)
        sites = _transforms(args.sites, args.transform)
        rename = dict(pair(text, "--rename", "NEW") for text in args.rename)
        features = extract(model, sites, rename=rename, dtype=_dtype(args.dtype))
        _tell(extract_dataset(features, _loader(args), args.out, options), Rank.here())
        return 0


def _must_be_at_least(args: argparse.Namespace, least: dict[str, int]) -> None:
    for name, number in least.items():
        given = getattr(args, name)
        if given is not None and not given >= number:  # NaN is not, either
            raise ScriptError(f"--{name.replace('_', '-')} {given}: it must be at least {number}")


def _options(args: argparse.Namespace) -> Options:
    from kedge.features.dataset.options import Options

    reduce = reducers(args.reduce)
    strange = [name for name in args.keep if name not in reduce]
    if strange:
        raise ScriptError(f"--keep {' '.join(strange)}: that is kept anyway; name what --reduce sums up")
    shards = {name: getattr(args, name) for name in ("shard_bytes", "shard_seconds") if getattr(args, name) is not None}
    return Options(
        batch=None if args.batch is None else _function(args.batch, "--batch"),
        keys=None if args.keys is None else _keys(args.keys),
        reduce=reduce,
        keep=args.keep,
        version=args.version,
        on_bad=args.on_bad,
        format=args.format,
        device=args.device,
        **shards,
    )


def _function(text: str, option: str) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = named(text)
    if not callable(found):
        raise ScriptError(f"{option} {text}: that is {_a(found)}; name a function that takes a batch")
    return found


def _keys(text: str) -> Any:
    """Read keys from a file, or take what a name stands for."""
    path = Path(text)
    if path.is_file():
        try:
            with path.open(encoding="utf-8") as file:  # which takes no other character for the end of a line
                return [line.removesuffix("\n") for line in file]
        except (OSError, ValueError) as error:
            raise ScriptError(f"--keys {text}: the file cannot be read ({error}); give UTF-8 text") from error
    if ":" not in text:
        raise ScriptError(
            f"--keys {text}: there is no such file in {Path.cwd()}; name one with a line for each sample, or MODULE:NAME"
        )
    found = named(text)
    if not (callable(found) or hasattr(found, "__iter__")):
        raise ScriptError(f"--keys {text}: that is {_a(found)}; name a list of keys, or a function that takes a batch")
    return found


def _model(args: argparse.Namespace) -> Any:
    from torch import nn

    from kedge.features.dataset.devices import usable

    device = None if args.device is None else usable(args.device)
    model = _made(args.model, nn.Module)
    if not isinstance(model, nn.Module):
        raise ScriptError(f"{args.model} gave {_a(model)}, not a model; name a module or a function that returns one")
    return model.eval() if device is None else model.eval().to(device)


def _loader(args: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader, Dataset

    data = _made(args.data, (Dataset, DataLoader))
    if isinstance(data, Dataset):
        size = BATCH_SIZE if args.batch_size is None else args.batch_size
        return DataLoader(data, batch_size=size, num_workers=args.workers or 0)
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
    if not callable(found) or isinstance(found, kinds):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ScriptError(
            f"{text} cannot be called without arguments: {error}; name a function without any that calls it"
        ) from error
    except ValueError:  # one in C, which does not say what it takes
        pass
    try:
        return found()
    except Exception as error:
        raise failed(text, error) from error


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _transforms(sites: Sequence[str], texts: Sequence[str]) -> dict[str, Callable[[Any], Any] | None]:
    """Give each site what its values go through; a transform without a site is all sites'."""
    from kedge.features.dataset.pooling import POOLINGS

    found: dict[str, Callable[[Any], Any] | None] = dict.fromkeys(sites)
    for text in texts:
        site, _, how = text.rpartition("=")
        if site and site not in found:
            raise ScriptError(f"--transform {text}: {site} is not among the sites {' '.join(sites)}")
        transform = POOLINGS.get(how) or function(how, "--transform", POOLINGS)
        if not callable(transform):
            raise ScriptError(
                f"--transform {text}: that is {_a(transform)}; name a function that takes a site's values"
            )
        found |= dict.fromkeys([site] if site else sites, transform)
    return found


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ScriptError(f"--dtype {name}: PyTorch has no such type; take float32, float16 or bfloat16, say")
    return found


def _tell(found: FeatureSet, rank: Rank) -> None:
    """Say what is in the folder; where other processes may still be writing, what this one has written."""
    from kedge.features.dataset import open_features
    from kedge.features.dataset.ranks import wait_for_others

    if not wait_for_others(rank):
        mine = found.written_by(rank.rank)
        print(f"{found.path}: {mine:,} samples by rank {rank.rank} of {rank.world}; others may still be writing theirs")
        return
    if rank.rank:
        return
    found = open_features(found.path)
    print(found)
    bad = list(found.bad.items())
    for key, why in bad[:_SHOWN]:
        print(f"left out: {key}: {why}", file=sys.stderr)
    if len(bad) > _SHOWN:
        print(f"left out: {len(bad) - _SHOWN} more", file=sys.stderr)
