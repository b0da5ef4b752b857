"""Samples of pages in shards of KV heads."""

from __future__ import annotations

from sample_driver import SampleDriver


def _mutant(name: str, rule: str, expect_message: str) -> SampleDriver:
    return SampleDriver(
        breaks=(rule,),
        case_classes=("Shard",),
        expect_message=expect_message,
        target=f"drivers_shards:{name}",
    )


SAMPLES = {
    "SwapsShards": _mutant("SwapsShards", "ID-7", "of that page"),
    "NumbersShardsByRank": _mutant("NumbersShardsByRank", "ID-7", "of that page"),
    "NamesShardsByRank": _mutant("NamesShardsByRank", "ID-7", "a get answers False"),
    "ForgetsShards": _mutant("ForgetsShards", "ID-7", "was not written"),
    "StoresRanks": _mutant("StoresRanks", "ID-7", "a get answers False"),
    "BindsAllPools": _mutant("BindsAllPools", "ID-7", "'indexer': 0"),
    "EveryHolderWrites": _mutant("EveryHolderWrites", "ID-8", "and its set writes"),
    "OneWriterForAll": _mutant("OneWriterForAll", "ID-8", "is the writer"),
    "LooksAtTheFirstShard": _mutant("LooksAtTheFirstShard", "EX-12", "lacks shard"),
    "RewritesIncompletePages": _mutant("RewritesIncompletePages", "SET-9", "of set number"),
    "FillsHoles": _mutant("FillsHoles", "GET-10", "answers True"),
    "DiscardsWholePages": _mutant("DiscardsWholePages", "GET-10", "a get answers False"),
}
