"""The nearest names, for error messages."""

from fnet._util._nearest import did_you_mean, nearest, nearest_to_pattern, similarity

PATHS = ["block/attention/kernel", "block/mlp/kernel", "embed/table", "head/bias"]


def test_a_misspelled_name_finds_the_most_similar_one_alone():
    assert nearest("kernal", {"bias": 0, "kernel": 1, "kernels": 2}) == ["kernel"]
    assert nearest("kernal", ["bias", "kernels", "kernel"], 2) == ["kernel", "kernels"]
    assert nearest("kernal", ["bias"]) == []
    assert did_you_mean("kernal", ["kernel"]) == "did you mean 'kernel'?"
    assert did_you_mean("kernal", ["bias"]) == did_you_mean("kernal", []) == ""


def test_a_bound_may_be_stricter():
    assert nearest("embed", ["embeddings"]) == ["embeddings"]
    assert nearest("embed", ["embeddings"], similar=0.7) == []


def test_a_pattern_always_shows_paths_if_there_are_any():
    assert nearest_to_pattern("block/.*/kernels", PATHS, 2) == (
        "'block/mlp/kernel', 'block/attention/kernel'"
    )
    assert nearest_to_pattern("q", PATHS, 2) == "'block/attention/kernel', 'block/mlp/kernel'"
    assert nearest_to_pattern("q", []) == ""


def test_similarity_is_between_zero_and_one():
    assert similarity("a100", "a100") == 1.0
    assert similarity("abc", "xyz") == 0.0
    assert 0.5 < similarity("a100", "a10") < 1
