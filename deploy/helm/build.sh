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
for file in "$here"/../prometheus/*.y*ml "$here"/../prometheus/*/*.y*ml; do
  [ -f "$file" ] && grep -q '^groups:' "$file" && ! grep -q '^tests:' "$file" || continue
  cp "$file" "$work/aerie/files/rules/"
done
if [ -d "$here/../grafana" ]; then
  find "$here/../grafana" -name '*.json' -exec cp {} "$work/aerie/files/dashboards/" \;
fi
echo "rules: $(ls "$work/aerie/files/rules" | wc -l), dashboards: $(ls "$work/aerie/files/dashboards" | wc -l)"
"${HELM:-helm}" package "$work/aerie" --destination "$out"
