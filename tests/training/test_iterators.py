"""from_iterator: the batches of an uninterrupted run after a resume, as far as the source's
guarantee goes."""

import io
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from several import processes

from fnet import training as tr
from fnet.training.loop import _positions

TX = optax.sgd(0.1)


def step(state, batch):
    seen = state.params["seen"] * 1.01 + batch["x"].sum().astype(jnp.float32)
    return state.replace(step=state.step + 1, params={"seen": seen}), {
        "x": batch["x"].sum().astype(jnp.float32)
    }


def start():
    return tr.TrainState.create({"seen": jnp.zeros(())}, TX)


def epoch(number):
    """Five batches in an order of the epoch's own."""
    order = np.random.default_rng(number).permutation(5)
    return ({"x": np.array([100 * number + i, 1])} for i in order)


class StatefulSource:
    """As a Hugging Face IterableDataset: the state belongs to the iterable."""

    def __init__(self):
        self.epoch, self.loaded, self.at, self.read = 0, None, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch, "raw": b"\x00\xff"}

    def load_state_dict(self, state):
        assert state["raw"] == b"\x00\xff"
        self.loaded = state

    def __iter__(self):
        loaded, self.loaded = self.loaded, None
        self.at = loaded["at"] if loaded else 0
        for batch in itertools.islice(epoch(self.epoch), self.at, None):
            self.at += 1
            self.read += 1
            yield batch


class StatefulIterator:
    """As an iterator of Grain: the state belongs to the iterator."""

    def __init__(self, number):
        self.items, self.at = list(epoch(number)), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def get_state(self):
        return {"at": np.int64(self.at)}

    def set_state(self, state):
        self.at = state["at"]


class Loader:
    """As torch's DataLoader."""

    def __init__(self, generator, number=0):
        self.sampler, self.number = self, number
        self.generator = generator

    def __iter__(self):
        return epoch(self.number)

    def __len__(self):
        return 5


SEQUENCE = [batch for number in range(3) for batch in epoch(number)]
SOURCES = {
    "sequence": (lambda: SEQUENCE, "exact"),
    "stateful source": (StatefulSource, "exact"),
    "stateful iterator": (lambda: StatefulIterator, "exact"),
    "function of the epoch": (lambda: epoch, "epoch"),
    "seeded loader": (lambda: lambda epoch: Loader(object(), epoch), "epoch"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SOURCES)
def test_resumed_is_unbroken_bit_for_bit(tmp_path, name):
    make, guarantee = SOURCES[name]
    options = {"steps": 15, "log_every": 1, "config": {}, "tensorboard": False, "save_every": 3}
    whole = tr.fit(step, start(), tr.from_iterator(make()), workdir=tmp_path / "whole", **options)
    out = io.StringIO()
    for stop in (2, 5, 6, 10, 15):  # inside an epoch, at its end, after it
        batches = tr.from_iterator(make())
        assert batches.resume == guarantee
        state = tr.fit(
            step,
            start(),
            batches,
            workdir=tmp_path / "parts",
            **options | {"steps": stop},
            progress=tr.Progress(out, bar=False),
        )
    np.testing.assert_array_equal(state.params["seen"], whole.params["seen"])
    rows = [
        [row["train/x"] for row in tr.read_metrics(tmp_path / part)] for part in ("whole", "parts")
    ]
    assert rows[0] == rows[1] == [float(batch["x"].sum()) for batch in SEQUENCE]
    assert out.getvalue().count(f"resume guarantee of the data: {guarantee} (a resumed run ") == 5


@pytest.mark.parametrize("name", SOURCES)
def test_every_position_can_be_returned_to(name):
    for i, ahead in itertools.product(range(12), range(4)):
        first, again = (tr.from_iterator(SOURCES[name][0]()) for _ in range(2))
        for j in range(i + ahead):
            first(j)
        if hasattr(first, "position"):
            again(0)
            again.seek(i, first.position(i))
        for j in range(i, 13):
            np.testing.assert_array_equal(again(j)["x"], SEQUENCE[j]["x"])


def test_a_stateful_source_does_not_read_the_epoch_again():
    source = StatefulSource()
    batches = tr.from_iterator(source)
    for i in range(9):
        batches(i)
    position = batches.position(8)
    again = StatefulSource()
    resumed = tr.from_iterator(again)
    resumed.seek(8, position)
    np.testing.assert_array_equal(resumed(8)["x"], SEQUENCE[8]["x"])
    assert again.read == 1


def test_a_state_without_the_shuffle_buffer_is_not_exact():
    """Hugging Face's states leave it out; with real data sets in test_hugging_face."""

    class BufferShuffledExamplesIterable:
        pass

    source = StatefulSource()
    assert tr.from_iterator(source).resume == "exact"
    source._ex_iterable = type("Formatted", (), {})()
    source._ex_iterable.ex_iterables = [BufferShuffledExamplesIterable()]
    assert tr.from_iterator(source).resume == "epoch"


def test_states_do_not_pile_up():
    batches = tr.from_iterator(StatefulSource())
    for i in range(700):
        batches(i)
        batches.position(i)
    assert len(batches._states) < 100


def test_steps_in_any_order():
    for make, _ in SOURCES.values():
        batches = tr.from_iterator(make())
        for i in (0, 0, 1, 7, 7, 3, 14, 2, 13):
            np.testing.assert_array_equal(batches(i)["x"], SEQUENCE[i]["x"])


def test_a_source_that_cannot_be_repeated_warns_at_a_resume(tmp_path):
    count = itertools.count()
    source = lambda: ({"x": np.array([next(count)])} for _ in range(4))
    options = {"workdir": tmp_path, "config": {}, "tensorboard": False}
    tr.fit(step, start(), tr.from_iterator(source, resume="none"), steps=3, **options)
    with pytest.warns(
        tr.ResumeWarning,
        match=r"from its beginning at step 3, not from the position .*: resume='none'",
    ):
        state = tr.fit(step, start(), tr.from_iterator(source, resume="none"), steps=5, **options)
    assert int(state.step) == 5
    loader = tr.from_iterator(Loader(None))
    assert (
        loader.resume == "none"
        and "pass a function of the epoch, lambda epoch: DataLoader(" in loader.why
    )
    assert tr.from_iterator(Loader(object())).resume == "none"  # its generator goes on
    assert tr.from_iterator(lambda: Loader(object())).resume == "epoch"
    fixed = Loader(None)
    del fixed.generator
    assert tr.from_iterator(fixed).resume == "epoch" and tr.from_iterator(fixed).steps(2.5) == 13


@pytest.mark.exhaustive
def test_each_process_goes_on_where_it_was(tmp_path):
    """Two processes with epochs of five and three batches: the guarantee "exact" is that of each."""
    script = pathlib.Path(__file__).with_name("reading.py")
    for me, came in enumerate(processes(script, 2, str(tmp_path))):
        assert came["same"] and came["read"] in (5, 6), (
            me,
            came,
        )  # one to look at, five to use: nothing again


def test_another_number_of_processes_is_reported():
    saved = {
        "processes": [
            {"epoch": 1, "first": 5, "state": "{}"},
            {"epoch": 2, "first": 6, "state": "{}"},
        ]
    }
    with pytest.warns(
        tr.ResumeWarning,
        match="the data was read by 2 processes and is now read by 1: each one reads "
        "its epoch from the start up to step 7, and the batches differ",
    ):
        assert _positions.own(saved, 7) == {"epoch": 1, "first": 5, "state": None}
    assert (
        _positions.own(saved["processes"][0], 7) == saved["processes"][0]
        and _positions.own(None, 7) is None
    )


def test_a_state_that_json_cannot_hold_reads_the_epoch_again():
    class Odd(StatefulSource):
        def state_dict(self):
            return {"at": object()}

    batches = tr.from_iterator(Odd())
    batches(0)
    assert batches.resume == "epoch" and batches.position(1)["state"] is None


def test_examples_become_batches():
    examples = [(np.full(3, i, np.float32), i) for i in range(7)]
    exact = tr.from_iterator(examples, batch_size=4, seed=3)
    same = tr.Batches((np.stack([x for x, _ in examples]), np.arange(7)), 4, seed=3)
    for i in (5, 0):
        jax.tree.map(np.testing.assert_array_equal, exact(i), same(i))
    assert (
        exact.resume == "exact"
        and exact.steps(2) == same.steps(2)
        and exact.identity() == same.identity()
    )
    grouped = tr.from_iterator(lambda: iter(examples), batch_size=4)
    assert [grouped(i)[1].tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]]


class Tensor:
    """As torch's."""

    def __init__(self, values, dtype="torch.float32"):
        self.values, self.dtype, self.shape = np.asarray(values), dtype, np.shape(values)

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.values.astype(np.float32))

    def numpy(self):
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


def test_tensors_become_arrays():
    batch = {
        "x": Tensor([1.5]),
        "h": Tensor([2.5], "torch.bfloat16"),
        "l": [Tensor(1), Tensor(2)],
        "j": jnp.ones(2),
    }
    got = tr.from_iterator([batch])(0)
    assert (
        got["h"].dtype == jnp.bfloat16
        and got["h"].tolist() == [2.5]
        and isinstance(got["x"], np.ndarray)
    )
    assert got["l"].tolist() == [1, 2] and isinstance(got["j"], jax.Array)


X = {"x": np.ones(2)}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: iter([X]),
            TypeError,
            "got a list_iterator, which can be iterated once. Pass the function that",
        ),
        (lambda: (X for _ in range(2)), TypeError, "got a generator, which can be iterated once"),
        (
            lambda: X,
            TypeError,
            "expected an iterable of batches, got a dict: use Batches for arrays",
        ),
        (
            lambda: 5,
            TypeError,
            "expected an iterable of batches, or a function that returns one, got a int",
        ),
        (
            lambda: lambda: 5,
            TypeError,
            "the function must return an iterable of batches, got a int",
        ),
        (lambda: [], ValueError, "the source is empty"),
        (lambda: lambda: [], ValueError, "epoch 0 has no batches$"),
        (
            lambda: (lambda one: lambda: one)(iter([X])),
            ValueError,
            "epoch 1 has no batches: the function must return a new iterable at each call",
        ),
        (
            lambda: [X, {"y": np.ones(2)}],
            ValueError,
            r"batch 1 has the arrays \['y'\], and the batches before it have \['x'\]: all batches "
            r"must have one structure",
        ),
        (lambda: [{}], ValueError, "batch 0 has no arrays"),
        (lambda: [{"t": ["a", "b"]}], TypeError, "batch 0: 't' holds text or objects"),
        (
            lambda: [{"t": [[1], [1, 2]]}],
            TypeError,
            "lists of different lengths: pad them to one length",
        ),
    ],
    ids=range(12),
)
def test_sources_that_are_none(make, error, text):
    with pytest.raises(error, match=text):
        batches = tr.from_iterator(make())
        batches(0), batches(1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": "exact"}, "resume='exact': expected 'epoch', 'none' or None"),
        ({"batch_size": 0}, "batch_size=0: a batch needs at least one example"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        tr.from_iterator([X], **options)


# The libraries themselves, where they are installed.


def resumes(make, guarantee, steps=10, at=(1, 3, 4, 7)):
    """Whether batches continue as they would have, from every position; returns them."""
    whole = tr.from_iterator(*make())
    assert whole.resume == guarantee
    batches = [whole(i) for i in range(steps)]
    for i in at:
        first = tr.from_iterator(*make())
        for j in range(i + 1):
            first(j)
        again = tr.from_iterator(*make())
        again.seek(i, first.position(i)) if hasattr(again, "seek") else None
        for j in range(i, steps):
            jax.tree.map(np.testing.assert_array_equal, again(j), batches[j])
    return batches


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    assert tr.from_iterator(DataLoader(data, batch_size=4, shuffle=True)).resume == "none"
    x, y = resumes(lambda: [DataLoader(data, batch_size=4)], "epoch")[0]
    assert x.tolist() == [0, 1, 2, 3] and y.dtype == np.int64
    shuffled = lambda epoch: DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(epoch)
    )
    batches = resumes(lambda: [shuffled], "epoch")
    assert not np.array_equal(batches[0][0], batches[3][0])
    assert tr.from_iterator(data, batch_size=4)(0)[0].shape == (4,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face():
    datasets = pytest.importorskip("datasets")
    import pyarrow

    table = datasets.table.InMemoryTable(pyarrow.table({"x": list(range(10)), "t": ["a"] * 10}))
    data = datasets.Dataset(table, fingerprint="none").select_columns(["x"])
    with pytest.raises(
        ValueError, match="the items of this data set are examples: pass batch_size="
    ):
        tr.from_iterator(data)
    exact = tr.from_iterator(data, batch_size=4)
    assert exact.resume == "exact" and sorted(
        np.concatenate([exact(0)["x"], exact(1)["x"], exact(2)["x"][:2]])
    ) == [*range(10)]
    plain = lambda: tr.from_iterator(data.to_iterable_dataset(), batch_size=4)
    buffered = lambda: tr.from_iterator(
        data.to_iterable_dataset().shuffle(seed=0, buffer_size=6), batch_size=4
    )
    for stream, guarantee in ((plain, "exact"), (buffered, "epoch")):
        whole = stream()
        batches = [whole(i) for i in range(9)]
        assert whole.resume == guarantee and len(batches[2]["x"]) == 2
        for i in (1, 3, 4, 7):
            first, again = stream(), stream()
            for j in range(i + 1):
                first(j)
            again.seek(i, first.position(i))
            for j in range(i, 9):
                np.testing.assert_array_equal(again(j)["x"], batches[j]["x"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grain():
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(np.arange(10)).seed(0).shuffle().batch(4)
    batches = resumes(lambda: [data], "exact")
    np.testing.assert_array_equal(batches[7], data[7])
    resumes(lambda: [data.to_iter_dataset()], "exact")
