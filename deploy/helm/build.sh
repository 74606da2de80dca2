#!/bin/sh
# Package the chart with the alert rules and dashboards of this repository, where there are any.
#
#     deploy/helm/build.sh [OUT]        writes OUT/aerie-VERSION.tgz; default: dist
#
# HELM names the helm to use. Rules are the *.yml and *.yaml of deploy/prometheus that hold
# `groups:` at their top and no `tests:`; dashboards the *.json of deploy/grafana.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-dist}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -R "$here/aerie" "$work/aerie"
mkdir -p "$work/aerie/files/rules" "$work/aerie/files/dashboards"
for file in "$here"/../prometheus/*.yml "$here"/../prometheus/*.yaml \
  "$here"/../prometheus/*/*.yml "$here"/../prometheus/*/*.yaml; do
  [ -f "$file" ] && grep -q '^groups:' "$file" && ! grep -q '^tests:' "$file" || continue
  cp "$file" "$work/aerie/files/rules/"
done
for file in "$here"/../grafana/*.json "$here"/../grafana/*/*.json; do
  [ -f "$file" ] && cp "$file" "$work/aerie/files/dashboards/"
done
echo "rules: $(ls "$work/aerie/files/rules" | wc -l), dashboards: $(ls "$work/aerie/files/dashboards" | wc -l)"
"${HELM:-helm}" package "$work/aerie" --destination "$out"
