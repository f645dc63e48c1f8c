"""The theorems hold, their counter-examples fail, and a wrong formula in theory.py itself is noticed."""

import json
import math

import pytest
import torch

import theory


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """One run of the whole file, as from the command line: (exit status, what the JSON file holds)."""
    path = tmp_path_factory.mktemp("theory") / "theory.json"
    status = theory.main(["--json", str(path)])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no temporary file is left
    return status, json.loads(path.read_text(encoding="utf-8"))


def row_of(name: str) -> dict:
    """One check, run by itself."""
    return theory.run_checks([check for check in theory.CHECKS if check.name == name])[0]


def test_all_checks_hold_and_all_counter_examples_fail(run):
    status, result = run
    assert theory.failures(result["checks"]) == []
    assert status == 0
    assert len(result["checks"]) >= 10


def test_json_format(run):
    rows = run[1]["checks"]
    assert list(run[1]) == ["checks"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == ["name", "claim", "measured", "relation", "bound", "holds", "counter_example"]
        assert row["relation"] in ("<=", ">=")
        assert row["holds"] is True and row["counter_example"]["holds"] is False
        assert list(row["counter_example"]) == ["measured", "holds"]
        assert all(math.isfinite(x) for x in (row["measured"], row["bound"], row["counter_example"]["measured"]))


def test_verdicts_follow_from_the_numbers(run):
    for row in run[1]["checks"]:
        sign = 1 if row["relation"] == "<=" else -1
        assert sign * row["measured"] <= sign * row["bound"]
        assert sign * row["counter_example"]["measured"] > sign * row["bound"]


def test_every_theorem_has_a_statement_and_a_claim():
    for check in theory.CHECKS:
        assert check.function.__doc__ and check.claim, check.name


# formula in theory.py, a plausible wrong one, the check that must notice
PRECONDITIONER, DUAL_GAIN = theory.preconditioner, theory.dual_gain
WRONG = [
    ("preconditioner", lambda gamma, weight, power=2: PRECONDITIONER(gamma, weight, 1), "dynamics_preconditioner"),
    ("preconditioner", lambda gamma, weight, power=2: PRECONDITIONER(gamma, weight, 1), "never_reverses"),
    ("preconditioner", lambda gamma, weight, power=2: PRECONDITIONER(gamma, 2 * weight), "dynamics_eigenvalues"),
    ("balance", lambda gamma, weight: gamma.square() - 2 * weight.square().sum(-2), "conservation_drift_order"),
    ("dual_gain", lambda weight, gradient: DUAL_GAIN(weight, gradient) / 2, "dual_excess"),
    ("heterogeneous_gain", lambda pulls: pulls.square().sum((0, -1)), "heterogeneous_difference"),
    ("predicted_spectrum", lambda kind, alpha, size: torch.ones_like(alpha), "reparameterized_away_from_init"),
    ("predicted_loss", lambda decay, d=6: 0.5 * d * (theory.REACH * decay) ** 2, "decay_output_amount"),
]


@pytest.mark.parametrize("formula, wrong, name", WRONG, ids=[f"{case[0]}-{case[2]}" for case in WRONG])
def test_a_wrong_formula_fails(monkeypatch, formula, wrong, name):
    assert row_of(name)["holds"]
    monkeypatch.setattr(theory, formula, wrong)
    assert not row_of(name)["holds"]


def test_a_fold_that_changes_the_function_fails(monkeypatch):
    def without_folding(model):
        theory.reset_scales_(model, "input_scale")  # the scales go, and no matrix takes them

    monkeypatch.setattr(theory, "fold_", without_folding)
    assert not row_of("expressivity_dense")["holds"]


@pytest.mark.parametrize("measured, counter_example", [(2.0, 3.0), (0.5, 0.5)], ids=["fails", "cannot fail"])
def test_exit_status_is_1(monkeypatch, capsys, measured, counter_example):
    """A check that does not hold, and one whose counter-example does, both fail the run."""
    check = theory.Check("broken", "x is at most 1", "<=", lambda: theory.Outcome(measured, 1.0, counter_example))
    monkeypatch.setattr(theory, "CHECKS", [check])
    assert theory.main([]) == 1
    output = capsys.readouterr().out
    assert "FAILS" in output and "1 failed: broken" in output


def test_a_number_that_is_none_is_no_verdict():
    check = theory.Check("broken", "", "<=", lambda: theory.Outcome(math.nan, 1.0, 2.0))
    with pytest.raises(FloatingPointError, match="broken"):
        theory.judge(check)


def test_flow_has_order_4_and_euler_order_1():
    """dx/dt = -x from 1: the error at time 1 falls by 2⁴, and by 2, as the step halves."""

    def error(steps, **options):
        start = [torch.ones(1, dtype=torch.float64)]
        end = theory.flow(lambda x: 0.5 * x.square(), start, 1 / steps, steps, **options)[-1][0]
        return (end - math.exp(-1)).abs().item()

    assert error(10) / error(20) == pytest.approx(16, rel=0.1)
    assert error(100, euler=True) / error(200, euler=True) == pytest.approx(2, rel=0.02)


def test_lanczos_finds_the_largest_eigenvalue():
    """Against a dense decomposition, of matrices whose most negative eigenvalue is the larger in size."""
    normal = theory.normal_numbers(0)
    matrix = normal(7, 30, 30)
    matrix = matrix + matrix.mT - 4 * torch.eye(30, dtype=torch.float64)
    found = theory.largest_eigenvalue(lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1), normal(7, 30), normal, steps=30)
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrix)[:, -1])


def test_the_number_of_threads_is_left_as_it_was():
    before = torch.get_num_threads()
    theory.run_checks(theory.CHECKS[11:12])
    assert torch.get_num_threads() == before


def test_pictures(tmp_path, monkeypatch):
    """One for each of the 11 theorems; a quick one is drawn."""
    assert len(theory.PICTURES) == 11
    monkeypatch.setattr(theory, "PICTURES", {"dual": theory.PICTURES["dual"]})
    theory.draw_pictures(tmp_path / "new")
    assert (tmp_path / "new" / "dual.png").read_bytes().startswith(b"\x89PNG")
