"""The dashboards as code. `python -m deploy.grafana` writes what Grafana reads."""
