"""Data sets of Ray: what two workers write is what this process would have written."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import kedge
from kedge.errors import BadSample, ExtractionFailed, OtherRun
from kedge.features.dataset import Cluster, Options, extract_dataset, open_features
from kedge.features.reduce import Histogram, Mean, TopK
from tests.features.dataset.imagesets import (
    Dicts,
    Doubling,
    Images,
    assert_equal,
    batches_of,
    features,
    image,
    in_memory,
    net,
    written,
)

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'kedge[ray]'", exc_type=ModuleNotFoundError
)

pytestmark = [
    pytest.mark.timing,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*", "ignore::ResourceWarning"),
]
#: Ray reports nothing to anybody, and writes no token into the home folder. Its workers do not stand
#: back behind the other tests, as they would.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])
    ),
}
CLUSTER = Cluster(batch_size=8, rows=8)
ONE = Cluster(workers=1, batch_size=8, rows=8)


@pytest.fixture(scope="module")
def cluster():
    """Start two workers' worth of Ray on this machine, and end it."""
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)  # which the workers inherit
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
        )
        yield
        ray.shutdown()
    assert set(threading.enumerate()) - before == set()


def images(length=48, **columns):
    """The images of `Images`, in blocks of eight, with other columns."""
    rows = [
        {"id": i, "image": image(i).numpy(), **{name: of(i) for name, of in columns.items()}}
        for i in range(length)
    ]
    return ray.data.from_items(rows, override_num_blocks=-(-length // 8))


def local(length=48):
    """What a loop in this process gives."""
    return in_memory(batches_of(Images(length)))


def meeting(marker, count):
    """What makes the model's arguments, and waits until so many processes have begun."""

    def give(rows):
        (marker / str(os.getpid())).touch()
        while len(list(marker.iterdir())) < count:
            time.sleep(0.01)
        return rows["image"]

    return give


def test_values_are_those_of_a_loop_in_memory(tmp_path, cluster):
    """Two workers write what a loop over the same batches keeps, to the last bit, each a part, under a column's keys."""
    (tmp_path / "begun").mkdir()
    both = meeting(tmp_path / "begun", 2)
    stored = {
        "labels": "id",
        "fields": {"name": lambda rows: [f"name {number}" for number in rows["id"]]},
    }
    found = features().dataset(
        images(), tmp_path / "out", keys="id", batch=both, cluster=CLUSTER, **stored
    )

    assert len(list((tmp_path / "begun").iterdir())) == 2
    assert found.samples == tuple(map(str, range(48)))
    assert_equal(found, local())
    assert_equal(open_features(tmp_path / "out"), local())
    assert list(map(str, found.labels[:].tolist())) == list(found.samples)
    assert list(found.fields["name"]) == [f"name {number}" for number in range(48)]


@pytest.mark.full
def test_a_column_of_labels_is_no_argument(tmp_path, cluster):
    """Of the rows' columns the model gets neither the keys nor the labels, as without labels; an index names no column."""
    labelled = images(8).map(lambda row: {**row, "label": f"class {row['id']}"})
    found = features().dataset(labelled, tmp_path / "out", keys="id", labels="label", cluster=ONE)

    assert list(found.labels) == [f"class {number}" for number in range(8)]
    with pytest.raises(
        ExtractionFailed,
        match="labels=True: a batch has no such entry: it has 'id', 'image', 'label'",
    ):
        features().dataset(labelled, tmp_path / "b", keys="id", labels=True, cluster=ONE)


@pytest.mark.full
def test_a_reducer_for_no_value_is_refused(tmp_path, cluster):
    """A name that only a batch can tell to be none is an error that says the names, and nothing is written."""
    with pytest.raises(
        ExtractionFailed, match="no value has the name '4'; the names are '1', '4:out'"
    ):
        taken = features(["1", "4:out"])
        taken.dataset(images(16), tmp_path / "out", keys="id", reduce={"4": Mean()}, cluster=ONE)

    assert list((tmp_path / "out").glob("shard-*")) == []


@pytest.mark.full
def test_hooks_stay_between_the_batches_of_a_call(tmp_path, cluster):
    """A worker puts its hooks up once for all batches that it is given together, as the loop in one process does."""
    taken = features()

    def looking(rows):
        number, hooks = len(list(tmp_path.glob("batch *"))), taken.model[1]._forward_hooks
        (tmp_path / f"batch {number} {len(hooks) > 0}").touch()
        return rows["image"]

    work = Cluster(workers=1, batch_size=8, rows=24)
    taken.dataset(images(24), tmp_path / "out", keys="id", batch=looking, cluster=work)

    assert [path.name for path in sorted(tmp_path.glob("batch *"))] == [
        "batch 0 False",
        "batch 1 True",
        "batch 2 True",
    ]


@pytest.mark.parametrize(
    ("keys", "given"), [(None, "keys= is not given"), (["a", "b"], "keys= is a list")]
)
def test_rows_without_a_column_of_keys_are_refused(tmp_path, cluster, keys, given):
    """Ray does not number rows, so the message names the columns, and what to give; nothing is made or read."""
    with pytest.raises(
        ExtractionFailed,
        match=f"{given}, .*name the column of 'id', 'image' that has .*keys='path'",
    ):
        features().dataset(images(8), tmp_path / "out", keys=keys, cluster=ONE)

    assert not (tmp_path / "out").exists()


def dying(marker, times, out=None):
    """What makes the model's arguments, and kills its process at image 19, so many times; when two shards are there."""

    def give(rows):
        deaths = len(list(marker.iterdir()))
        if deaths < times and 19 in rows["id"]:
            while out and len(list(out.glob("shard-*"))) < 2:
                time.sleep(0.01)
            (marker / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows["image"]

    return give


def test_a_worker_that_dies_loses_and_doubles_no_sample(tmp_path, cluster):
    """Ray makes a dead worker's call again: every sample is there once, and was summed up once."""
    (tmp_path / "deaths").mkdir()
    reduce = {"4": [Mean(), Histogram(edges=[-9, -1, 0, 1, 9]), TopK(3)]}
    options = {"keys": "id", "reduce": reduce, "keep": ["4"]}
    killing = dying(tmp_path / "deaths", 2, tmp_path / "out")
    found = features().dataset(
        images(), tmp_path / "out", batch=killing, cluster=ONE, shard_bytes=1, **options
    )
    once = extract_dataset(
        features(), batches_of(Images(48)), tmp_path / "once", Options(reduce=reduce, keep=["4"])
    )

    assert len(list((tmp_path / "deaths").iterdir())) == 2
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(48))
    assert_equal(found, local())
    (mean, *exact), (wanted, *others) = found.reduced["4"], once.reduced["4"]
    assert mean.result()["n"] == 48
    torch.testing.assert_close(mean.result()["mean"], wanted.result()["mean"])
    assert [repr(one.result()) for one in exact] == [repr(one.result()) for one in others]


class Killing(Mean):
    """Kills its process once, at image 19."""

    def __init__(self, marker):
        super().__init__()
        self.settings, self.marker = Mean().settings, marker

    def update(self, values, keys=None):
        if "19" in keys and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().update(values, keys)


@pytest.mark.full
def test_a_task_that_dies_while_it_writes_doubles_no_sample(tmp_path, cluster):
    """What a dead task has written of its rows is left out when Ray begins it again."""
    work = Cluster(workers=1, batch_size=8, rows=24)
    options = {"keys": "id", "reduce": {"4": Killing(tmp_path / "killed")}, "keep": ["4"]}
    found = features().dataset(images(), tmp_path / "out", cluster=work, shard_bytes=1, **options)

    assert (tmp_path / "killed").exists()
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(48))
    assert found.reduced["4"][0].result()["n"] == 48
    assert_equal(found, local())
    assert list((tmp_path / "out").glob(".*")) == []


@pytest.mark.filterwarnings("ignore:The (minimum|maximum) number of concurrent")
def test_no_rows_are_no_features(tmp_path, cluster):
    """A data set without rows is no error: the folder opens and holds nothing."""
    found = features().dataset(images(8).limit(0), tmp_path / "out", keys="id", cluster=ONE)

    assert (found.samples, len(found), found.bad) == ((), 0, {})


@pytest.mark.full
def test_samples_that_kill_every_worker_end_the_run(tmp_path, cluster):
    """After as many deaths as are allowed an error says at which samples the workers were."""
    (tmp_path / "deaths").mkdir()
    killing = dying(tmp_path / "deaths", 99)
    work = Cluster(workers=1, batch_size=8, rows=8, deaths=1)
    with pytest.raises(ExtractionFailed, match="2 workers died, while they computed '16' to '23'"):
        features().dataset(images(), tmp_path / "out", keys="id", batch=killing, cluster=work)


@pytest.mark.full
def test_a_bad_row_is_named_and_can_be_left_out(tmp_path, cluster):
    """A row that the model cannot take is named by its key; skipped, it is written down, and the others are there."""

    def small(rows):
        if (rows["id"] == 30).any():
            raise ValueError("image 30 is broken")
        return rows["image"]

    options = {"keys": "id", "batch": small, "cluster": ONE}
    with pytest.raises(
        BadSample, match="no features of sample '30': ValueError: image 30 is broken; fix it"
    ):
        features().dataset(images(), tmp_path / "out", **options)
    before = len(written(tmp_path / "out"))
    found = features().dataset(images(), tmp_path / "out", on_bad="skip", **options)

    assert before
    assert found.bad == {"30": "ValueError: image 30 is broken"}
    assert sorted(map(int, written(tmp_path / "out"))) == sorted(set(range(48)) - {30})
    with pytest.raises(OtherRun, match="the keys are 'id', here 'other'"):
        features().dataset(images(), tmp_path / "out", keys="other", cluster=ONE)


@pytest.mark.full
def test_a_data_set_that_cannot_be_read_is_an_error(tmp_path, cluster):
    """An error that Ray wraps is raised as it was."""

    def reads(row):
        if row["id"] == 40:
            raise OSError("disk 3 is gone")
        return row

    with pytest.raises(
        ExtractionFailed, match="Ray could not read the data set.*OSError: disk 3 is gone"
    ):
        features().dataset(images().map(reads), tmp_path / "out", keys="id", cluster=ONE)


@pytest.mark.full
def test_columns_are_keyword_arguments(tmp_path, cluster):
    """Columns are the model's arguments by name, without the one that tells rows apart, which may hold text."""
    torch.manual_seed(7)
    model = Doubling().eval()
    rows = images(16, name=lambda i: f"image {i:02}.png", twice=lambda i: i % 2 == 1)
    rows = rows.rename_columns({"image": "x"}).drop_columns(["id"])
    taken = kedge.extract(model, {"linear": halved})
    found = taken.dataset(rows, tmp_path / "out", keys="name", cluster=ONE)
    wanted = extract_dataset(taken, batches_of(Dicts(16)), tmp_path / "local")

    assert found.samples == tuple(f"image {i:02}.png" for i in range(16))
    assert_equal(found, {"linear": wanted["linear"].tensor()})
    with pytest.raises(
        ExtractionFailed,
        match="keys='path': there is no such column; there are 'x', 'name', 'twice'",
    ):
        taken.dataset(rows, tmp_path / "other", keys="path", cluster=ONE)


def halved(values):
    """A transform that workers find by its name."""
    return values / 2


@pytest.mark.full
def test_a_key_stands_for_one_row(tmp_path, cluster):
    """A column that does not tell rows apart is refused, whether a worker is given both rows at once or not."""
    twice = images(16, half=lambda i: i // 2, turn=lambda i: i % 8)
    with pytest.raises(ExtractionFailed, match=r"the key '\d' belongs to 2 samples"):
        features().dataset(
            twice.select_columns(["half", "image"]), tmp_path / "a", keys="half", cluster=ONE
        )
    with pytest.raises(
        ExtractionFailed,
        match="Ray read 16 rows, and there are 8 samples: keys= does not distinguish",
    ):
        features().dataset(
            twice.select_columns(["turn", "image"]), tmp_path / "b", keys="turn", cluster=ONE
        )


def slow(rows):
    """What makes the model's arguments, and leaves time to kill the program."""
    time.sleep(0.5)
    return rows["image"]


KILLED = """
import sys
import ray
from tests.features.dataset.imagesets import features
from kedge.features.dataset import Cluster
from tests.features.dataset.test_dataset_ray import images, slow
ray.init(address=sys.argv[1], log_to_driver=False)
features().dataset(images(), sys.argv[2], keys="id", batch=slow, cluster=Cluster(workers=1, batch_size=8, rows=8))
"""


@pytest.mark.full
def test_a_run_that_is_killed_goes_on(tmp_path, cluster):
    """After kill -9 of the program its workers end, and the next run takes what is missing, and nothing twice."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        KILLED,
        ray.get_runtime_context().gcs_address,
        str(tmp_path / "out"),
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not list((tmp_path).glob("out/shard-*")):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    running.kill()
    running.wait()
    running.stderr.close()
    before = set(written(tmp_path / "out"))
    found = features().dataset(images(), tmp_path / "out", keys="id", batch=slow, cluster=ONE)

    assert before < set(found.samples)
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(48))
    assert_equal(found, local())


@pytest.mark.full
def test_what_workers_cannot_open_is_named(tmp_path, cluster, monkeypatch):
    """A transform that only this process can import, or that cannot be sent, is an error that says so."""
    (tmp_path / "only_here.py").write_text("def halved(values):\n    return values / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    taken = kedge.extract(net(), {"4": importlib.import_module("only_here").halved})
    with pytest.raises(
        ExtractionFailed, match="cannot be loaded on .*: No module named 'only_here'"
    ):
        taken.dataset(images(8), tmp_path / "out", keys="id", cluster=ONE)
    lock = threading.Lock()
    taken = kedge.extract(net(), {"4": lambda values: values if lock else None})
    with pytest.raises(ExtractionFailed, match="cannot be sent to workers: TypeError"):
        taken.dataset(images(8), tmp_path / "out", keys="id", cluster=ONE)


def test_workers_that_leave_nothing_to_read_with_are_refused(tmp_path, cluster):
    """What would wait for ever is an error that says how much there is."""
    with pytest.raises(
        ExtractionFailed, match="2 workers with 1 CPUs each leave none of the cluster's 2 to read"
    ):
        features().dataset(
            images(), tmp_path / "out", keys="id", cluster=Cluster(workers=2, cpus=1)
        )


def test_ray_is_not_imported_for_other_data():
    """Whoever gives a loader does not need Ray."""
    program = "import sys, kedge.features.dataset, kedge.features.extract; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_cluster_has_workers():
    """What cannot be is refused."""
    with pytest.raises(ExtractionFailed, match="workers=0: it must be at least 1"):
        Cluster(workers=0)
