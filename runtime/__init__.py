"""What every process shares, impure: connections, links, timers, logs, configuration, HTTP.

`overlay` holds the rules; this package moves their bytes with asyncio. It stands apart so that
the rules stay testable without an event loop.
"""
