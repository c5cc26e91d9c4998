"""PySpark over the traces of every hop: shipping, reports and streaming; see docs/spark.md."""
