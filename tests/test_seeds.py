"""Seeds are functions of their path."""

from klimb.seeds import derive_seed


def test_a_seed_is_a_function_of_its_path_and_fits_a_generator() -> None:
    assert derive_seed(0, "rollout", 3) == derive_seed(0, "rollout", 3)
    assert 0 <= derive_seed(2**63 - 1, "eval", 10**9, 10**9) < 2**63


def test_different_paths_have_different_seeds() -> None:
    paths = {(seed, name, i) for seed in range(5) for name in ("rollout", "eval", "minibatches") for i in range(200)}
    assert len({derive_seed(*path) for path in paths}) == len(paths)


def test_the_literal_values_are_pinned_since_runs_resume_by_them() -> None:
    assert derive_seed(0, "rollout", 0) == 7823815315310568912
    assert derive_seed(7, "eval", 1, 2) == 5179135263165920891
