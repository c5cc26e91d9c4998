"""One Spark session for all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from coordinator.java import find_java
from spark_analysis.analysis import Analysis, analyse
from spark_analysis.reading import open_session, prepare, read_traces


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
