//go:build tools

// Package commands names what is built from this module, so that go.mod and go.sum cover it.
package commands

import _ "helm.sh/helm/v4/cmd/helm"
