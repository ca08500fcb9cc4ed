"""The engine under the hunt: logits are those of the whole sequence, and a wrong block shows."""

from workbench.analysis.hunt import engine, hunt


def test_nothing_in_our_engine():
    assert hunt("engine", seconds=None, workloads=12, seed=2) == []


def test_a_block_of_somebody_else_is_found(monkeypatch):
    pack = engine.prepare_unified

    def one_block_for_all(*given, **options):
        packed = pack(*given, **options)
        packed.block_table[:, 0] = 1
        return packed

    monkeypatch.setattr(engine, "prepare_unified", one_block_for_all)
    (finding, *_) = hunt("engine", seconds=None, workloads=12, seed=2, laws=["content"])
    assert "other logits than those of its tokens" in finding.message and finding.num_requests <= 3
