"""One Spark session for all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from coordinator.java import find_java
from overlay.trace import Event, Reason
from spark_analysis.analysis import Analysis, analyse
from spark_analysis.reading import open_session, prepare, read_traces
from tests.spark_analysis.nodes import MS, QOS, Delays, Overlay


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Small data: planning and compiling would take nearly all of the time.
    session = open_session(
        "local[2]",
        "tests",
        find_java().home,
        {
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Xshare:auto",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.codegen.wholeStage": "false",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def analyse_folder(spark: SparkSession) -> Callable[[Path], Analysis]:
    """Ship and analyse the traces of a folder."""

    def work(folder: Path) -> Analysis:
        location, shipment = prepare(str(folder))
        return analyse(spark, read_traces(spark, location), shipment, lambda _: None)

    return work


@pytest.fixture(scope="session")
def outage(tmp_path_factory: pytest.TempPathFactory, analyse_folder: Callable[[Path], Analysis]) -> Analysis:
    """A run in which the first router dies: 100 messages, 30-32 lost, 80-89 late by a slow link.

    50 dies with the router. The second one takes over from 51 on, 400 ms late.
    """
    folder = tmp_path_factory.mktemp("outage")
    overlay = Overlay(QOS)
    for sequence in range(1, 101):
        late = sequence > 50
        at_ns = sequence * 10 * MS + (400 * MS if late else 0)
        overlay.carry(
            sequence,
            at_ns,
            Delays(to_egress=60 * MS) if 80 <= sequence < 90 else None,
            lost_at="router-1" if 30 <= sequence <= 32 else "edge-plant" if sequence == 50 else "",
            router=overlay.second_router if late else None,
        )
    overlay.egress.saw(Event.DUPLICATE, 7, 49, came="router-2", in_ns=900 * MS)
    overlay.egress.saw(Event.DUPLICATE, 7, 48, came="router-2", in_ns=900 * MS)
    overlay.ingress.saw(Event.DROPPED, 7, 100, in_ns=1_500 * MS, reason=Reason.SHED_TOLERATED)
    overlay.write(folder)
    return analyse_folder(folder)
