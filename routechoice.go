package sandboxer

// RouteChoice is the result for one candidate when a request was routed. Choices are in the order in which the candidates were
// considered. Only Words quotes hosts or backends.
type RouteChoice struct {
	Extension string       `json:"extension"`
	Verdict   RouteVerdict `json:"verdict"`
	Reason    RouteReason  `json:"reason"`
	Detail    string       `json:"detail,omitempty"` // the reason as a sentence, and what would change it
	Price     *Credits     `json:"price,omitempty"`  // for the whole time to live; nil if it is not known
	Words     string       `json:"-"`                // what the backend said, for administrators; not stored
}

// RouteVerdict is the outcome for one candidate.
type RouteVerdict string

// The verdicts.
const (
	RouteChosen  RouteVerdict = "chosen"  // it serves the request
	RouteStandby RouteVerdict = "standby" // it could, and another one comes before it
	RouteRefused RouteVerdict = "refused" // it cannot serve this request, or not now
)

// RouteReason is why a candidate has its verdict. The list is closed: RouteReasons.
type RouteReason string

// The reasons of a candidate that is chosen, of one on standby, and of one that is refused.
const (
	WhyOnly     RouteReason = "only"     // the profile is on this extension
	WhyFirst    RouteReason = "first"    // the first in the list that can serve the request
	WhyCheapest RouteReason = "cheapest" // the first by price that can serve the request
	WhyWaits    RouteReason = "waits"    // as first or cheapest, and the request waits there for room

	WhyLater RouteReason = "later" // one before it serves the request

	WhyUnusable     RouteReason = "unusable"         // the extension could not be opened
	WhyLacks        RouteReason = "lacks_capability" // that the profile requires
	WhyIsolation    RouteReason = "lacks_isolation"  // that the profile promises
	WhyUnknownInput RouteReason = "unknown_input"    // the request gives one that it does not take
	WhyMissingInput RouteReason = "missing_input"    // it needs one that the request does not give
	WhyFixedInput   RouteReason = "fixed_input"      // it has another fixed value for an input
	WhyFixedImage   RouteReason = "fixed_image"      // its image is another
	WhyLimits       RouteReason = "above_limits"     // the request is for more than its limits
	WhyNetwork      RouteReason = "above_network"    // the request is for more than its network
	WhyNotAllowed   RouteReason = "not_allowed"      // the caller may not have it there
	WhyInvalid      RouteReason = "invalid"          // the request cannot be right there
	WhyUnsupported  RouteReason = "unsupported"      // its backend cannot do it
	WhyPrice        RouteReason = "above_max_cost"   // it costs more than the request allows
	WhyNoPrice      RouteReason = "price_unknown"    // the request bounds the cost, and the price is not known
	WhyFull         RouteReason = "no_room"          // it has no room now
	WhyFailing      RouteReason = "failing"          // it failed several times in a row, and routes skip it for a while
	WhyUnavailable  RouteReason = "unavailable"      // its backend cannot be asked now
	WhyPolicy       RouteReason = "policy"           // the policy does not allow it as the next candidate
)

// RouteReasons lists every reason.
func RouteReasons() []RouteReason {
	return []RouteReason{
		WhyOnly, WhyFirst, WhyCheapest, WhyWaits, WhyLater, WhyUnusable, WhyLacks, WhyIsolation, WhyUnknownInput, WhyMissingInput, WhyFixedInput,
		WhyFixedImage, WhyLimits, WhyNetwork, WhyNotAllowed, WhyInvalid, WhyUnsupported, WhyPrice, WhyNoPrice, WhyFull, WhyFailing,
		WhyUnavailable, WhyPolicy,
	}
}

// MayPass reports whether a candidate that is refused for this reason may serve the same request later.
func (r RouteReason) MayPass() bool {
	return r == WhyUnusable || r == WhyFull || r == WhyFailing || r == WhyUnavailable
}
