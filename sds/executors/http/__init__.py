"""An executor for any payment gateway with HTTP, described in a file: `load_executor("gateway.yaml")`."""

from sds.executors.http.executor import HttpExecutor, load_executor, parse_gateway

__all__ = ["HttpExecutor", "load_executor", "parse_gateway"]
