"""PySpark over the traces of every hop: reports and streaming. Nothing is traced yet."""
