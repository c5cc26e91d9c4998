"""Sessions, and traces as DataFrames: from a local folder, which is shipped first, or from any URL."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql import functions as sf

from overlay.trace import ROW_COLUMNS, SEGMENT_COLUMNS, Column
from spark_analysis.errors import AnalysisError
from spark_analysis.schema import ROWS_FOLDER, SEGMENTS_FOLDER
from spark_analysis.shipper import PARQUET_FOLDER, Shipment, has_segments, ship

_TYPES: Final = {
    "long": types.LongType(),
    "string": types.StringType(),
    "double": types.DoubleType(),
    "boolean": types.BooleanType(),
    "timestamp": types.TimestampType(),
}


def _schema(columns: Iterable[Column]) -> types.StructType:
    return types.StructType([types.StructField(column.name, _TYPES[column.kind]) for column in columns])


ROWS_SCHEMA: Final = _schema(ROW_COLUMNS)
SEGMENTS_SCHEMA: Final = _schema(SEGMENT_COLUMNS)

SMALL_ROWS: Final = 300_000
PARTITION_ROWS: Final = 500_000
QUIET: Final = f"-Dlog4j2.configurationFile=file:{Path(__file__).with_name('log4j2.properties')}"
"""Errors only: Spark's warnings about host names and native libraries help nobody here."""

_MASTER: Final = re.compile(r"local(\[[\w*, ]+\])?|local-cluster\[.+\]|yarn|(spark|k8s)://.+")
"""Spark itself answers any other with a stack trace of Java's."""
_STANDALONE: Final = "spark://"
_ANSWER_S: Final = 5.0
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True)
class Traces:
    """The traces of one run."""

    rows: DataFrame
    segments: DataFrame
    """With the name of the `file` each is from; the rows of the segment are in another of that name."""
    location: str

    def rows_without(self, files: Collection[str]) -> DataFrame:
        """The rows of all other files; these are not even opened."""
        if not files or not self.rows.inputFiles():
            return self.rows
        return self.rows.where(~sf.col("_metadata.file_name").isin(*files))

    def unread_segments(self, read: Collection[str]) -> list[str]:
        """Files below `segments` that are not among those that were read."""
        return sorted({unquote(path.rpartition("/")[2]) for path in self.segments.inputFiles()} - set(read))


SMALL_JOB: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": f"{QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss8m",
}
"""Settings with which Spark is quick on one machine as long as there is little to do at a time.

The stack is for queries that are stopped in a batch: Spark looks through the long reason with a recursive
expression.
"""


def open_session(
    master: str, name: str, java_home: Path | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for one job; `java_home` is the Java that a new JVM shall use. Raises AnalysisError."""
    if not _MASTER.fullmatch(master):
        raise AnalysisError(
            f"master is {master!r}: give local[2], spark://HOST:PORT, yarn or k8s://https://HOST:PORT"
        )
    if master.startswith(_STANDALONE):
        _find_master(master)
    if java_home is not None:
        os.environ["JAVA_HOME"] = str(java_home)
    builder = (
        SparkSession.builder.appName(name)
        .master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", QUIET)
        .config("spark.ui.showConsoleProgress", "false")
        # All times are UTC, on the driver and on every worker.
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.adaptive.enabled", "true")
        # Otherwise every expression looks up its place in the Python source.
        .config("spark.python.sql.dataFrameDebugging.enabled", "false")
    )
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # One host: nothing has to be reachable from outside, and small runs need few tasks.
        builder = (
            builder.config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "2g")
            .config("spark.sql.shuffle.partitions", "16")
        )
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        raise AnalysisError(
            f"Spark did not start with master {master} ({_reason(error)}): check that the master "
            "runs and that `isthmus doctor` finds Java"
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    return session


def _find_master(master: str) -> None:
    """Raise AnalysisError if no standalone master answers: Spark would try for two minutes."""
    for address in master.removeprefix(_STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), _ANSWER_S):
            return
    raise AnalysisError(f"no master answers at {master}: start one, or check host and port")


def settings_for(url: str) -> dict[str, str]:
    """What makes Spark on one machine quick for traces of this size; nothing for those elsewhere.

    Of a small job nearly all the time goes into planning, generating code and compiling it, so it
    does without most of that.
    """
    if not url.startswith("file:"):
        return {}
    files = (Path(url.removeprefix("file://")) / ROWS_FOLDER).rglob("*.parquet")
    rows = 0
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # the report tells of damaged files
            rows += pq.read_metadata(file).num_rows
    if rows > SMALL_ROWS:
        # So small that a few of them are sorted in memory at a time.
        return {"spark.sql.shuffle.partitions": str(max(4, -(-rows // PARTITION_ROWS)))}
    return SMALL_JOB


def is_url(location: str) -> bool:
    """Whether a location is for Spark to read, not a local folder."""
    return _URL.match(location) is not None


def local_url(path: Path) -> str:
    """A path for Spark. Hadoop takes a URL as it stands: one that is percent-encoded is another file."""
    return f"file://{path.absolute()}"


def prepare(location: str) -> tuple[str, Shipment]:
    """Ship what waits in a local trace folder; returns where the Parquet files are.

    `location` may be the folder that nodes write to, a folder of shipped traces, or a URL of one.
    """
    if is_url(location):
        return location.rstrip("/"), Shipment()
    folder = Path(location).absolute()
    try:
        if not folder.is_dir():
            raise AnalysisError(f"{location} is no folder: give the one that the nodes write their traces to")
        shipment = ship(folder) if has_segments(folder) else Shipment()
        for candidate in (folder, folder / PARQUET_FOLDER):
            if (candidate / SEGMENTS_FOLDER).is_dir():
                return local_url(candidate), shipment
    except OSError as error:
        raise AnalysisError(
            f"{location} cannot be read ({error.strerror}): allow reading it, or run this as its owner"
        ) from error
    raise AnalysisError(
        f"{location} has no traces: neither segments nor {ROWS_FOLDER}/ and {SEGMENTS_FOLDER}/ in Parquet. "
        "Are brokers started with tracing?"
    )


def read_traces(session: SparkSession, location: str) -> Traces:
    """The traces at a URL, with the schema they must have."""
    return Traces(
        rows=_read(session, f"{location}/{ROWS_FOLDER}", ROWS_SCHEMA),
        segments=_read(session, f"{location}/{SEGMENTS_FOLDER}", SEGMENTS_SCHEMA, with_file=True),
        location=location,
    )


FILE_OPTIONS: Final = {
    "recursiveFileLookup": "true",
    "pathGlobFilter": "*.parquet",
    # A file that another system damaged is noticed by its missing rows, see `problems`.
    "ignoreCorruptFiles": "true",
    "ignoreMissingFiles": "true",
}


def _read(
    session: SparkSession, path: str, schema: types.StructType, *, with_file: bool = False
) -> DataFrame:
    file = sf.col("_metadata.file_name").alias("file")
    if path.startswith("file:") and not Path(path.removeprefix("file://")).is_dir():
        nothing = session.createDataFrame([], schema)
        return nothing.withColumn("file", sf.lit(None).cast("string")) if with_file else nothing
    try:
        found = session.read.schema(schema).options(**FILE_OPTIONS).parquet(path)
        return found.select("*", file) if with_file else found
    except Exception as error:
        raise AnalysisError(
            f"{path} cannot be read ({_reason(error)}): check the address, and that Spark has what it needs "
            "for such addresses (--conf spark.jars.packages=...)"
        ) from error


def _reason(error: Exception) -> str:
    """What Java says, without where in Java."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The first line of an error that Java has thrown (a Py4JJavaError) may be about the call alone.
    called = lines and lines[0].startswith("An error occurred while calling") and len(lines) > 1
    return lines[1] if called else next(iter(lines), type(error).__name__)
