// Package measure takes samples and says what they come to: the one harness of `sandboxer
// bench` and of the programs in bench/.
//
// [Plan.Interleave] lets arms, which are what is compared, take turns, so that whatever else
// the machine does hits all of them alike; [Load.Run] does many things at the same time.
// Samples go into a [Set] of [Series]. [Describe], [Trim], [Spread] and [Outliers] describe
// one series, and [RatioOf] compares the medians of two, with how sure that is.
//
// What is not a finite number is no sample: it is counted apart, and no figure is ever
// infinite or not a number.
package measure
