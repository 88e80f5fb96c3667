"""``kedge extract``: the features of a whole data set, into a folder."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.cli.factory import named
from kedge.cli.output import make_writable
from kedge.cli.progress import add_quiet
from kedge.cli.reducers import arguments, failed, function, pair, reducers
from kedge.errors import ScriptError

if TYPE_CHECKING:
    from kedge.features.dataset.folder.reading import FeatureSet
    from kedge.features.dataset.keys_and_fields import Field
    from kedge.features.dataset.options import Options, SharingRank

#: The samples of a batch.
BATCH_SIZE = 64
_SHOWN = 5


class ExtractCommand:
    """Write the features of a whole data set into a folder.

    MODULE:NAME is a model, or a function that returns one; --data names a data set, a DataLoader,
    or a function that returns one. The model is put into evaluation mode. Samples that are in the
    folder already are skipped, so a killed run continues when it is started again. Under torchrun
    each process takes a part of the samples, and the first waits for the others and prints a
    summary.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "model",
            metavar="MODULE:NAME",
            help="the model, or a function that returns it, such as torchvision.models:resnet18",
        )
        parser.add_argument(
            "--data",
            metavar="MODULE:NAME",
            required=True,
            help="the data set or DataLoader, or a function that returns it",
        )
        parser.add_argument(
            "--sites",
            metavar="SELECTOR",
            nargs="+",
            required=True,
            help="the sites to extract, such as layer4 avgpool",
        )
        parser.add_argument(
            "--out",
            metavar="DIR",
            required=True,
            help="the folder to write or to continue",
        )
        parser.add_argument(
            "--rename",
            metavar="SITE=NAME",
            nargs="+",
            default=[],
            help="names for the values of sites",
        )
        parser.add_argument(
            "--transform",
            metavar="[SITE=]HOW",
            nargs="+",
            default=[],
            help=(
                "transform of the values: mean, max (over positions, "
                "without padding), tokens, first, last (of a sequence), "
                "flatten, or MODULE:FUNCTION; "
                "where the model does not show the dimensions, such as mean(channels=-1)"
            ),
        )
        parser.add_argument(
            "--dtype",
            metavar="DTYPE",
            help="type to keep values in, such as float16 (default: their own)",
        )
        self._add_summing(parser)
        self._add_loading(parser)
        self._add_writing(parser)
        add_quiet(parser)

    def _add_summing(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--reduce",
            metavar="NAME=HOW",
            nargs="+",
            default=[],
            help=(
                "keep a statistic instead: mean, covariance, histogram, quantiles, "
                "topk, or MODULE:NAME of a reducer; "
                "arguments in parentheses, such as 'conv1=covariance(positions=mean)'; "
                "several for one name are allowed"
            ),
        )
        parser.add_argument(
            "--keep",
            metavar="NAME",
            nargs="+",
            default=[],
            help="values to keep although --reduce names them",
        )

    def _add_loading(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--batch-size",
            metavar="N",
            type=int,
            help=f"samples per batch (default: {BATCH_SIZE})",
        )
        parser.add_argument(
            "--workers",
            metavar="N",
            type=int,
            help="processes that load samples (default: 0)",
        )
        parser.add_argument(
            "--device",
            metavar="DEVICE",
            help="device to compute on, such as cuda",
        )
        parser.add_argument(
            "--batch",
            metavar="MODULE:FUNCTION",
            help=(
                "function of a batch that returns the model's arguments: "
                "a tensor, a tuple or a dict (default: its first entry)"
            ),
        )
        parser.add_argument(
            "--items",
            choices=["samples", "batches"],
            help="what a DataLoader with batch_size=None yields, where its items do not show it",
        )
        parser.add_argument(
            "--keys",
            metavar="FILE",
            help=(
                "keys of the samples: a file with a line for each, "
                "or MODULE:NAME of a list, or of a function "
                "that returns those of a batch (default: their index)"
            ),
        )
        parser.add_argument(
            "--labels",
            metavar="ENTRY",
            nargs="?",
            const=True,
            help="store the labels too: the index or the name of an entry of each batch, or MODULE:FUNCTION of a batch "
            "(without ENTRY, as at the end of the line: the second entry)",
        )
        parser.add_argument(
            "--fields",
            metavar="NAME=ENTRY",
            nargs="+",
            default=[],
            help="what else to store of each batch, such as path=2; ENTRY as for --labels",
        )
        parser.add_argument(
            "--version",
            metavar="TEXT",
            help=(
                "text that identifies your functions, instead of their digests: "
                "runs with the same text continue the folder"
            ),
        )
        parser.add_argument(
            "--on-bad",
            choices=["raise", "skip"],
            default="raise",
            help="raise an error for a sample that fails, or skip it",
        )

    def _add_writing(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--format",
            choices=["safetensors", "zarr", "parquet"],
            default="safetensors",
            help="format of the shards",
        )
        parser.add_argument(
            "--shard-bytes",
            metavar="N",
            type=int,
            help="write a shard when it reaches N bytes (default: 64 MiB)",
        )
        parser.add_argument(
            "--shard-seconds",
            metavar="S",
            type=float,
            help="write a shard when it is S seconds old (default: 60)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the folder, and print a summary."""
        from kedge.features.dataset import extract_dataset
        from kedge.features.dataset.options import SharingRank
        from kedge.features.extract import extract

        _must_be_at_least(
            args, {"batch_size": 1, "workers": 0, "shard_bytes": 1, "shard_seconds": 0}
        )
        options = _options(args)
        model = _model(args)
        sites = _transforms(args.sites, args.transform)
        rename = dict(pair(text, "--rename", "NEW") for text in args.rename)
        features = extract(model, sites, rename=rename, dtype=_dtype(args.dtype))
        done = extract_dataset(features, _loader(args), args.out, options)
        make_writable()
        _print(done, SharingRank.here())
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
        raise ScriptError(
            f"--keep {' '.join(strange)}: these values are kept in any case; "
            "name values that --reduce reduces"
        )
    fields = {}
    for one in args.fields:
        name, entry = pair(one, "--fields", "ENTRY")
        fields[name] = _entry(entry, "--fields")

    given: dict[str, Any] = {}
    if args.batch is not None:
        given["batch"] = _function(args.batch, "--batch")
    if args.keys is not None:
        given["keys"] = _keys(args.keys)
    if args.labels is not None:
        given["labels"] = _entry(args.labels, "--labels")
    if args.shard_bytes is not None:
        given["shard_bytes"] = args.shard_bytes
    if args.shard_seconds is not None:
        given["shard_seconds"] = args.shard_seconds
    if args.quiet:
        given["progress"] = False
    return Options(
        fields=fields,
        reduce=reduce,
        keep=args.keep,
        version=args.version,
        on_bad=args.on_bad,
        items=args.items,
        format=args.format,
        device=args.device,
        **given,
    )


def _function(text: str, option: str) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = named(text)
    if not callable(found):
        raise ScriptError(
            f"{option} {text}: this is {_a(found)}; name a function that takes a batch"
        )
    return found


def _entry(text: str | bool, option: str) -> Field:
    if isinstance(text, bool):
        return text
    if text.removeprefix("-").isdecimal():
        return int(text)
    if ":" in text:
        return _function(text, option)
    return text


def _keys(text: str) -> Any:
    """Return keys from a file, or the object of a name."""
    path = Path(text)
    if path.is_file():
        try:
            with path.open(encoding="utf-8") as file:  # only newlines end its lines
                return [line.removesuffix("\n") for line in file]
        except (OSError, ValueError) as error:
            raise ScriptError(
                f"--keys {text}: the file cannot be read ({error}); give UTF-8 text"
            ) from error
    if ":" not in text:
        raise ScriptError(
            f"--keys {text}: there is no such file in {Path.cwd()}; "
            "name one with a line for each sample, or MODULE:NAME"
        )
    found = named(text)
    if not (callable(found) or hasattr(found, "__iter__")):
        raise ScriptError(
            f"--keys {text}: this is {_a(found)}; "
            "name a list of keys, or a function that takes a batch"
        )
    return found


def _model(args: argparse.Namespace) -> Any:
    from torch import nn

    from kedge.features.dataset.compute import usable

    device = None
    if args.device is not None:
        device = usable(args.device)
    model = _made(args.model, nn.Module)
    if not isinstance(model, nn.Module):
        raise ScriptError(
            f"{args.model} is {_a(model)}, not a model; "
            "name a module, or a function that returns one"
        )
    model = model.eval()
    if device is not None:
        model = model.to(device)
    return model


def _loader(args: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader, Dataset

    data = _made(args.data, (Dataset, DataLoader))
    if isinstance(data, Dataset):
        size = BATCH_SIZE if args.batch_size is None else args.batch_size
        return DataLoader(data, batch_size=size, num_workers=args.workers or 0)
    options = {"--batch-size": args.batch_size, "--workers": args.workers}
    given = [word for word, value in options.items() if value is not None]
    if given:
        raise ScriptError(
            f"{args.data} is {_a(data)}, which loads its samples itself; "
            f"leave {' and '.join(given)} out"
        )
    if not hasattr(data, "__iter__"):
        raise ScriptError(
            f"{args.data} is {_a(data)}; "
            "name a data set, a DataLoader, or a function that returns one"
        )
    return data


def _made(text: str, kinds: Any) -> Any:
    """Return the object of a name, or the result of calling it."""
    found = named(text)
    if not callable(found) or isinstance(found, kinds):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ScriptError(
            f"{text} cannot be called without arguments: {error}; "
            "name a function without arguments that calls it"
        ) from error
    except ValueError:  # a function in C without a signature
        pass
    try:
        return found()
    except Exception as error:
        raise failed(text, error) from error


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _transforms(
    sites: Sequence[str], texts: Sequence[str]
) -> dict[str, Callable[[Any], Any] | None]:
    """Return the transform of each site; one without a site is for all of them."""
    from kedge.features.pooling import POOLINGS

    found: dict[str, Callable[[Any], Any] | None] = dict.fromkeys(sites)
    for text in texts:
        site, how = _site_and_how(text)
        if site and site not in found:
            raise ScriptError(
                f"--transform {text}: {site} is not among the sites {' '.join(sites)}"
            )
        word, _, _ = how.partition("(")
        is_pooling = word in POOLINGS
        option = "--transform"
        transform = _pool(how, text) if is_pooling else function(how, option, POOLINGS)
        if not callable(transform):
            raise ScriptError(
                f"--transform {text}: this is {_a(transform)}; "
                "name a function that takes a site's values"
            )
        transformed = [site] if site else sites
        found |= dict.fromkeys(transformed, transform)
    return found


def _site_and_how(text: str) -> tuple[str, str]:
    """Return the parts of [SITE=]HOW; an argument in parentheses may have an = of its own."""
    before, bracket, arguments = text.partition("(")
    site, _, how = before.rpartition("=")
    return site, how + bracket + arguments


def _pool(how: str, text: str) -> Callable[[Any], Any]:
    """Return the transform for a pooling, such as mean or mean(channels=-1)."""
    from kedge.features.pooling import Pool

    word, bracket, rest = how.partition("(")
    call = f"({rest}" if bracket else "()"
    args, kwargs = arguments(call, f"--transform {text}")
    try:
        return Pool(word, *args, **kwargs)  # type: ignore[arg-type]
    except TypeError as error:
        raise ScriptError(
            f"--transform {text}: {error}; it takes channels=DIMENSION and padding=keep"
        ) from error


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ScriptError(
            f"--dtype {name}: PyTorch has no such type; "
            "use float32, float16 or bfloat16, for example"
        )
    return found


def _print(found: FeatureSet, rank: SharingRank) -> None:
    """Print a summary of the folder; if other processes may still be writing, of this one's part."""
    from kedge.features.dataset import open_features
    from kedge.features.dataset.options import wait_for_others

    if not wait_for_others(rank):
        mine = found.written_by(rank.rank)
        print(
            f"{found.path}: {mine:,} samples by rank {rank.rank} of {rank.world}; "
            "other ranks may still be writing"
        )
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
